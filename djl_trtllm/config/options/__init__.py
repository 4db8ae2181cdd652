"""Every option, declared once.

A field has a type and `option(DEFAULT, DESCRIPTION, ...)`, or `unset(DESCRIPTION, ...)` without a default. A group is
described by the keywords of its class. Messages, the resolved table, the pages of
`docs/options/` and `serving.properties.example` are made from these declarations. Options without effect are rows of
`config/compat/legacy.toml`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import create_model

from djl_trtllm.config.options.build import BuildOptions, PluginOptions
from djl_trtllm.config.options.choices import Choice
from djl_trtllm.config.options.engine import EngineOptions, ParallelismOptions, PyTorchOptions
from djl_trtllm.config.options.model import ArchitectureOptions, LoraOptions, ModelOptions, QuantizationOptions
from djl_trtllm.config.options.option import Option, OptionGroup, Scope, ValueType, as_text, declaration, option
from djl_trtllm.config.options.scheduling import DecodingOptions, KvCacheOptions, LimitOptions, SchedulerOptions
from djl_trtllm.config.options.server import (
    AccessOptions,
    ClientOptions,
    ConnectionOptions,
    DjlServerOptions,
    ServerOptions,
    TelemetryOptions,
    TritonOptions,
)
from djl_trtllm.config.options.serving import ServingOptions
from djl_trtllm.config.options.vllm import VllmOptions
from djl_trtllm.config.tables import read_table

_TYPES: dict[str, type] = {"boolean": bool, "whole number": int, "number": float, "text": str, "path": Path}
_OF_THE_FIELD = ("type", "default", "after", "today", "djl", "warn", "scope", "aliases")
_OF_DJL_SERVING = ("djl_worker", "djl_server")


ROWS: dict[str, dict[str, dict[str, Any]]] = read_table("legacy.toml")
"""The rows of each group by field, in the order of the file."""


def _field(row: dict[str, Any], group: str) -> tuple[Any, Any]:
    """Type and declaration of a row's field."""
    kind = row["type"]
    if isinstance(kind, list):
        choice: Any = Choice
        base = choice("LegacyChoice", {word.upper(): word for word in kind})
    else:
        base = _TYPES[kind]
    declared = {name: value for name, value in row.items() if name not in _OF_THE_FIELD}
    field = option(
        base(row["default"]) if "default" in row else None,
        **declared,
        aliases=tuple(row.get("aliases", ())),
        scope=Scope(row.get("scope", Scope.MODEL.value)),
        legacy=row["today"],
        under_djl=row.get("djl", "read by DJL Serving" if group in _OF_DJL_SERVING else ""),
        warn=row.get("warn", False),
    )
    return (base if "default" in row else base | None), field


_FIELDS: dict[str, Any] = {name: _field(row, group) for group, rows in ROWS.items() for name, row in rows.items()}
LegacyOptions = create_model("LegacyOptions", __base__=OptionGroup, **_FIELDS)
"""The values of these options: they are parsed and checked as all others."""


def with_legacy(group: str, names: list[str]) -> list[str]:
    """The fields of a group, its legacy ones in their places."""
    place = 0
    for name, row in ROWS.get(group, {}).items():
        if "after" in row:
            place = names.index(row["after"]) + 1
        names.insert(place, name)
        place += 1
    return names


class Options(
    LegacyOptions,  # type: ignore[valid-type, misc]  # made at run time
    DjlServerOptions,
    TritonOptions,
    TelemetryOptions,
    ClientOptions,
    AccessOptions,
    ConnectionOptions,
    ServerOptions,
    ServingOptions,
    LoraOptions,
    VllmOptions,
    PyTorchOptions,
    DecodingOptions,
    ArchitectureOptions,
    QuantizationOptions,
    PluginOptions,
    BuildOptions,
    EngineOptions,
    ParallelismOptions,
    SchedulerOptions,
    KvCacheOptions,
    LimitOptions,
    ModelOptions,
):
    """The values of all options, typed and frozen. Made by `resolve`; where values came from is in `Config`.

    The groups are in reverse, so that the fields are in the order of the documents.
    """


@dataclass(frozen=True)
class Group:
    """A group of options as documents show it; `name` is that of its page and of its rows in `legacy.toml`."""

    name: str
    title: str
    declarations: type[OptionGroup] = OptionGroup

    @property
    def fields(self) -> list[str]:
        """The fields of the group in the order of the documents, those without effect in their places."""
        return with_legacy(self.name, list(self.declarations.model_fields))


_DECLARED = [Group(group.group_name, group.heading, group) for group in reversed(Options.__bases__[1:])]
GROUPS: tuple[Group, ...] = (
    *_DECLARED[:-1],
    Group("djl_handler", "Options of DJL Serving's handlers"),
    Group("djl_worker", "DJL Serving's workers"),
    _DECLARED[-1],
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


def _declared() -> Iterator[DeclaredOption]:
    for group in GROUPS:
        for name in group.fields:
            info = Options.model_fields[name]
            yield DeclaredOption(
                name, declaration(name, info, group.declarations), ValueType.of(info.annotation), info.default, group
            )


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
    # Without the prefix, which would make any two options similar.
    bare = {spelling.removeprefix("option."): spelling for spelling in reversed(folded)}
    near = difflib.get_close_matches(lowered.removeprefix("option."), bare, n=1, cutoff=0.8)
    return folded[bare[near[0]]] if near else None
