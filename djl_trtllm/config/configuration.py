"""The resolved configuration: values and their origins."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from djl_trtllm.config.options import OPTIONS, Options
from djl_trtllm.config.options.option import NotAValueError, as_text
from djl_trtllm.config.sources import Origin, Setting, masked
from djl_trtllm.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """Typed options with their origins. Made by `resolve` or `load`.

    `warnings` are lines for the log; `notes` need no action. `model_dir` is the model's directory, if there is one.
    `overridden` has the settings that others override, by field name.
    """

    options: Options
    origins: Mapping[str, Origin] = field(default_factory=dict)
    user_set: frozenset[str] = frozenset()
    warnings: tuple[str, ...] = ()
    model_dir: Path | None = None
    overridden: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def origin(self, field_name: str) -> Origin:
        """Return where the value of a field came from. Raises KeyError for a name that `Options` does not have."""
        return self.origins.get(OPTIONS[field_name].name, Origin.default())

    def is_set(self, field_name: str) -> bool:
        """Return whether the user set the field, even if a rule then changed its value.

        Raises KeyError for a name that `Options` does not have.
        """
        return OPTIONS[field_name].name in self.user_set

    @property
    def engine_cache_dir(self) -> Path:
        """Folder of the engine cache: as set, or `~/.cache/djl-trtllm`. It may not exist yet."""
        if self.options.engine_cache_dir is not None:
            return _expanded(self.options.engine_cache_dir)
        return _expanded(Path("~/.cache/djl-trtllm"))

    def replace(self, origin: Origin, **values: Any) -> Config:
        """This configuration with other values for some fields, all with the given origin.

        No rule between options runs again: replacing `max_num_tokens` raises no other limit. Raises `ConfigError` for
        values of the wrong type or out of range and for names that are no fields.
        """
        problems: list[str] = []
        checked: dict[str, Any] = {}
        for name, value in values.items():
            declared = OPTIONS.get(name)
            if declared is None:
                problems.append(f"{name}={value} ({origin}): there is no such option")
                continue
            try:
                checked[name] = declared.type.check(value, declared.option)
            except NotAValueError as error:
                problems.append(f"{declared.key}={as_text(value)} ({origin}): {error}")
        if problems:
            raise ConfigError(problems)
        return replace(
            self,
            options=self.options.model_copy(update=checked),
            origins={**self.origins, **dict.fromkeys(values, origin)},
            user_set=self.user_set | set(values) if origin.is_user else self.user_set,
        )


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        # Containers run as arbitrary users, who have no home directory.
        return Path(tempfile.gettempdir()) / "djl-trtllm"


def format_setting(config: Config, name: str) -> str:
    """`KEY=VALUE (origin)` of the option of this field, with secrets masked."""
    return format_value(name, getattr(config.options, name), config.origin(name))


def format_value(name: str, value: Any, origin: Origin) -> str:
    """`KEY=VALUE (origin)` of any value of this field, with secrets masked."""
    key = OPTIONS[name].key
    return f"{key}={masked(key, as_text(value)) or 'none'} ({masked('', str(origin))})"
