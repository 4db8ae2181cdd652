"""Options that a program gives as keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from djl_trtllm.config.options.registry import find, suggest
from djl_trtllm.config.options.values import as_text
from djl_trtllm.errors import ConfigError


def _anything(name: str) -> str | None:
    return None


def as_arguments(options: Mapping[str, Any], problem: Callable[[str], str | None] = _anything) -> list[str]:
    """KEY=VALUE pairs for `load`, of options by name, with or without `option.`; None means not given.

    `problem` says what else is wrong with a name. Raises ConfigError for names that are no options.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if problems := [text for name in given if (text := problem(name) or _unknown(name)) is not None]:
        raise ConfigError(problems)
    return [f"{name}={as_text(value)}" for name, value in given.items()]


def _unknown(name: str) -> str | None:
    if find(name) or find(f"option.{name}"):
        return None
    near = suggest(f"option.{name}") or suggest(name)
    advice = f"did you mean {near.removeprefix('option.')}?" if near else "docs/options.md has the options there are"
    return f"{name} is not an option; {advice}"
