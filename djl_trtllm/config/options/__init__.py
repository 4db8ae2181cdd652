"""Every option, declared once: a row of `model.toml`, `engine.toml` or `server.toml`, by group.

Messages, the resolved table, the pages of `docs/options/` and `serving.properties.example` are made from these rows.

A group has a `heading`, and what all its options have unless they say otherwise: the `prefix` of their keys, `scope`,
`source`. A row has the `default` and the fields of `Option`; `count`, `amount` and `devices` are units with a bound.
The type of an option that code reads is in `choices.OptionTypes`, that of another option is its default's, or the row
has the `type`. `values` are those of a text that has no others.

An option with a `legacy` text is accepted and has no effect: nothing reads its value. An option that loses its last
effect gets one, and `python -m tools.options_docs` writes the pages anew.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from djl_trtllm.config.options.choices import OptionTypes
from djl_trtllm.config.options.option import Option, ValueType, as_text, option_of
from djl_trtllm.files import read_table

_HINTS = get_type_hints(OptionTypes)
_FILES = ("model.toml", "engine.toml", "server.toml")
_TABLES = {name: table for file in _FILES for name, table in read_table(file, __package__).items()}
_TYPES: dict[str, type] = {"boolean": bool, "whole number": int, "number": float, "text": str, "path": Path}


@dataclass(frozen=True)
class Group:
    """A group of options as documents show it; `name` is that of its page and of its rows.

    `fields` are in the order of the documents.
    """

    name: str
    title: str
    fields: tuple[str, ...]


GROUPS: tuple[Group, ...] = tuple(
    Group(name, table["heading"], tuple(field for field, row in table.items() if isinstance(row, dict)))
    for name, table in _TABLES.items()
)
"""The groups of options, in the order of the documents."""


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


def _type(name: str, row: dict[str, Any]) -> ValueType:
    """The type in `OptionTypes`, or that in the row ("numbers" and "texts" are several), or the default's."""
    if name in _HINTS:
        found = ValueType.of(_HINTS[name])
    else:
        kind = row.get("type", "")
        base = _TYPES[kind.removesuffix("s")] if kind else type(row.get("default", ""))
        found = ValueType(base, "default" not in row, many=kind.endswith("s"))
    return replace(found, words=tuple(row.get("values", found.words)))


def _declared() -> Iterator[DeclaredOption]:
    for group in GROUPS:
        table = _TABLES[group.name]
        shared = {name: value for name, value in table.items() if name != "heading" and not isinstance(value, dict)}
        for name in group.fields:
            row = shared | table[name]
            option, type_ = option_of(name, row), _type(name, row)
            default = type_.check(row["default"], option) if "default" in row else None
            yield DeclaredOption(name, option, type_, default, group)


OPTIONS: dict[str, DeclaredOption] = {declared.name: declared for declared in _declared()}
"""Every option by its field name, in the order of the documents."""


if TYPE_CHECKING:

    class _Values:
        def __init__(self, **values: Any) -> None: ...

else:
    _Values = make_dataclass(
        "_Values",
        [(name, Any, field(default=each.default)) for name, each in OPTIONS.items()],
        frozen=True,
        kw_only=True,
    )


class Options(_Values, OptionTypes):
    """The values of all options, typed and frozen. Made by `resolve`; where values came from is in `Config`."""

    def updated(self, values: Mapping[str, Any]) -> "Options":
        """These options with other values for some fields, which are not checked."""
        return Options(**{**vars(self), **values})

    @property
    def ranks(self) -> int | None:
        """GPUs over which the options spread a model; None if that depends on the machine (`max`)."""
        if self.tensor_parallel_degree == "max":
            return None
        return self.tensor_parallel_degree * self.pipeline_parallel_degree * self.context_parallel_size


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
    # Without the prefix, which would make any two options similar.
    bare = {spelling.removeprefix("option."): spelling for spelling in reversed(folded)}
    near = difflib.get_close_matches(lowered.removeprefix("option."), bare, n=1, cutoff=0.8)
    return folded[bare[near[0]]] if near else None
