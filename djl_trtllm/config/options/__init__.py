"""Every option, declared once: a row in TOML, and its type in `choices.OptionTypes`.

`model.toml`, `engine.toml` and `server.toml` have the options that do something, by group; `config/compat/legacy.toml`
has those without effect. Messages, the resolved table, the pages of `docs/options/` and `serving.properties.example`
are made from these rows.

A group has a `heading`, and what all its options have unless they say otherwise: the `prefix` of their keys, `scope`,
`source`. A row has the `default`, the `values` of a text that has no others, and the fields of `Option`; `count`,
`amount` and `devices` are units with a bound.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import ConfigDict, create_model

from djl_trtllm.config.options.choices import OptionTypes
from djl_trtllm.config.options.option import Option, ValueType, as_text, option_of
from djl_trtllm.files import read_table

_HINTS = get_type_hints(OptionTypes)
_FILES = ("model.toml", "engine.toml", "server.toml")
_TABLES = {name: table for file in _FILES for name, table in read_table(file, __package__).items()}
ROWS: dict[str, dict[str, dict[str, Any]]] = read_table("legacy.toml")
"""The rows of options without effect, by group and field, in the order of the file."""

_TYPES: dict[str, type] = {"boolean": bool, "whole number": int, "number": float, "text": str, "path": Path}
_OF_DJL_SERVING = ("djl_worker", "djl_server")


@dataclass(frozen=True)
class Group:
    """A group of options as documents show it; `name` is that of its page and of its rows.

    `fields` are in the order of the documents, those without effect in their places.
    """

    name: str
    title: str
    fields: tuple[str, ...]


def with_legacy(group: str, names: list[str]) -> list[str]:
    """The fields of a group, its legacy ones in their places."""
    place = 0
    for name, row in ROWS.get(group, {}).items():
        if "after" in row:
            place = names.index(row["after"]) + 1
        names.insert(place, name)
        place += 1
    return names


def _group(name: str, table: dict[str, Any]) -> Group:
    fields = [field for field, row in table.items() if isinstance(row, dict)]
    return Group(name, table["heading"], tuple(with_legacy(name, fields)))


GROUPS: tuple[Group, ...] = tuple(_group(name, table) for name, table in _TABLES.items())
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


def _legacy_type(row: dict[str, Any]) -> ValueType:
    """The type of an option without effect, which its row names."""
    kind, words = row["type"], tuple[str, ...]()
    if isinstance(kind, list):
        kind, words = "text", tuple(kind)
    return ValueType(_TYPES[kind], "default" not in row, words=words)


def _declared() -> Iterator[DeclaredOption]:
    for group in GROUPS:
        table = _TABLES[group.name]
        shared = {name: value for name, value in table.items() if name != "heading" and not isinstance(value, dict)}
        for name in group.fields:
            if name in table:
                row = shared | table[name]
                type_ = ValueType.of(_HINTS[name])
                type_ = replace(type_, words=tuple(row.get("values", type_.words)))
            else:
                row = ROWS[group.name][name]
                type_ = _legacy_type(row)
                row = row | {
                    "under_djl": row.get("djl", "read by DJL Serving" if group.name in _OF_DJL_SERVING else "")
                }
            option = option_of(name, row)
            default = type_.check(row["default"], option) if "default" in row else None
            yield DeclaredOption(name, option, type_, default, group)


OPTIONS: dict[str, DeclaredOption] = {declared.name: declared for declared in _declared()}
"""Every option by its field name, in the order of the documents."""


def _annotation(declared: DeclaredOption) -> Any:
    own: Any = declared.type.base
    return _HINTS.get(declared.name, own | None if declared.type.optional else own)


_FIELDS: dict[str, Any] = {name: (_annotation(declared), declared.default) for name, declared in OPTIONS.items()}
# protected_namespaces: half of the documented options begin with `model_`.
_CONFIG = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
_Values: Any = create_model("_Values", __config__=_CONFIG, **_FIELDS)


class Options(_Values, OptionTypes):  # type: ignore[misc]  # the first is made at run time
    """The values of all options, typed and frozen. Made by `resolve`; where values came from is in `Config`."""

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
