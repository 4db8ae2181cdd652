"""All declared options, by field name and by every spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from djl_trtllm.config.options import GROUPS, Group, Options
from djl_trtllm.config.options.option import Option, declaration
from djl_trtllm.config.options.values import ValueType, as_text


@dataclass(frozen=True)
class DeclaredOption:
    """One field of `Options`: its name in Python, its declaration, type, default and group."""

    name: str
    option: Option
    type: ValueType
    default: Any
    group: Group

    @property
    def key(self) -> str:
        return self.option.key

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.option.key, *self.option.aliases)

    @property
    def example(self) -> str:
        """An example value: the default, or the option's example if the default is empty."""
        return as_text(self.default) or self.option.example

    @property
    def expectation(self) -> str:
        """The expected values as text: type, unit, range."""
        return self.type.describe(self.option)


def _declared() -> Iterator[DeclaredOption]:
    for group in GROUPS:
        for name in group.fields:
            info = Options.model_fields[name]
            yield DeclaredOption(name, declaration(name, info), ValueType.of(info.annotation), info.default, group)


OPTIONS: dict[str, DeclaredOption] = {declared.name: declared for declared in _declared()}
"""Every option by its field name, in the order of the documents."""

_BY_SPELLING = {spelling: declared for declared in OPTIONS.values() for spelling in declared.spellings}


def find(key: str) -> DeclaredOption | None:
    """The option that `key` names, by its own key or by an alias."""
    return _BY_SPELLING.get(key)


def suggest(key: str) -> str | None:
    """The spelling nearest to an unknown `key`, or None when nothing is near.

    A key that only lacks the prefix `option.`, has it too much or differs in case comes before a similar one.
    """
    folded = {spelling.lower(): spelling for spelling in _BY_SPELLING}
    lowered = key.lower().replace("-", "_")
    for candidate in (lowered, f"option.{lowered}", lowered.removeprefix("option.")):
        if candidate in folded:
            return folded[candidate]
    near = difflib.get_close_matches(lowered, folded, n=1, cutoff=0.8)
    return folded[near[0]] if near else None
