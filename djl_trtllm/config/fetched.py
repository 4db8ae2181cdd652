"""The options that a fetched repository's configuration may set: the list in `fetched.toml`.

It is a list, so that a new option is not on it by itself. The owner of a repository on the hub or in S3 may say how its
model runs. Files and addresses of this machine, its caches and secrets, and permissions are the operator's: set them in
the environment or on the command line.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.config.sources import Setting, Source, variables_of
from djl_trtllm.config.tables import read_table

_TABLE = read_table("fetched.toml", "djl_trtllm.config")
MAY_SET = frozenset(_TABLE["may_set"])
WITHIN = frozenset(_TABLE["within"])


def within_bounds(source: Source, model: str) -> Source:
    """The source, a file of the fetched `model`, without what it may not set, and a warning of each such setting."""
    kept = tuple(setting for setting in source.settings if _may_set(setting))
    warnings = tuple(_ignored(setting, model) for setting in source.settings if setting not in kept)
    return replace(source, settings=kept, warnings=(*source.warnings, *warnings))


def _ignored(setting: Setting, model: str) -> str:
    declared = find(setting.key)
    variable = variables_of(setting.key if declared is None else declared.key)[0]
    return (
        f"{setting} is ignored: {model} was fetched, and its own files may set only what "
        f"docs/fetched-models.md lists; if you want it, set {variable} in the environment"
    )


def _may_set(setting: Setting) -> bool:
    declared = find(setting.key)
    if declared is None or declared.option.legacy:
        return True  # it has no effect
    if declared.name in WITHIN:
        path = Path(setting.value.strip())
        return (
            not path.is_absolute() and ".." not in path.parts and not setting.value.strip().startswith(("~", "file:"))
        )
    return declared.name in MAY_SET


def listed() -> list[str]:
    """The keys of the options in the order of their groups, for the documents."""
    return [declared.key for name, declared in OPTIONS.items() if name in MAY_SET or name in WITHIN]
