"""Shared by the tests of this folder."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping

import pytest
from rich.console import Console
from rich.text import Text

from djl_trtllm.config import Config
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.resolve import resolve
from djl_trtllm.config.sources import OriginKind, Source, parse_properties, read_environment
from djl_trtllm.errors import ConfigError


def from_text(text: str, environ: Mapping[str, str] | None = None) -> Config:
    """Resolve a serving.properties of this text and an environment."""
    return resolve([*read_environment(environ or {}), parse_properties(text, "serving.properties")])


def problems_of(text: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_text(text, environ)
    return caught.value.problems


def values(source: Source) -> list[tuple[str, str]]:
    """The keys and values of a source."""
    return [(setting.key, setting.value) for setting in source.settings]


def resolves_or_is_refused(sources: Iterable[Source]) -> None:
    """Foreign files of any content become a configuration with origins, or a ConfigError with problems."""
    try:
        config = resolve(sources)
    except ConfigError as error:
        assert error.problems
        return
    assert set(config.origins) == set(OPTIONS)
    assert all(config.origin(name).line for name in config.user_set if config.origin(name).kind is OriginKind.FILE)


def printed(text: Text, *, styles: bool = False) -> str:
    """A list as a terminal shows it."""
    console = Console(width=300, record=True, file=io.StringIO(), force_terminal=styles, color_system="standard")
    console.print(text, soft_wrap=True)
    return console.export_text(styles=styles)


def items(text: str) -> dict[str, dict[str, str]]:
    """The items of a list that is not wrapped: details by heading."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines()[1:]:
        if line.startswith("  "):
            name, detail = re.split(r"\s{2,}", line.strip(), maxsplit=1)
            found[list(found)[-1]][name] = detail
        elif line:
            found[line] = {}
    return found
