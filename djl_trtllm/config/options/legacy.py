"""Options that are accepted and have no effect, from the rows of `config/compat/legacy.toml`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import create_model

from djl_trtllm.config.options.choices import Choice
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option, Scope

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE = "legacy.toml"
_TYPES: dict[str, type] = {"boolean": bool, "whole number": int, "number": float, "text": str, "path": Path}
_OF_THE_FIELD = ("type", "default", "after", "today", "warn", "scope", "aliases")

Row = dict[str, Any]


def _read() -> dict[str, dict[str, Row]]:
    text = resources.files("djl_trtllm.config.compat").joinpath(_FILE).read_text(encoding="utf-8")
    rows: dict[str, dict[str, Row]] = tomllib.loads(text)
    return rows


ROWS: dict[str, dict[str, Row]] = _read()
"""The rows of each group by field, in the order of the file."""


def _annotation(row: Row) -> Any:
    kind = row["type"]
    if isinstance(kind, list):
        choice: Any = Choice
        base = choice("LegacyChoice", {word.upper(): word for word in kind})
    else:
        base = _TYPES[kind]
    option = Option(
        **{name: value for name, value in row.items() if name not in _OF_THE_FIELD},
        aliases=tuple(row.get("aliases", ())),
        scope=Scope(row.get("scope", Scope.MODEL.value)),
        legacy=row["today"],
        warn=row.get("warn", False),
    )
    annotation = base if "default" in row else base | None
    return base, Annotated[annotation, option]


def _fields() -> Iterator[tuple[str, Any]]:
    for rows in ROWS.values():
        for name, row in rows.items():
            base, annotation = _annotation(row)
            default = row.get("default")
            yield name, (annotation, default if default is None else base(default))


LegacyOptions = create_model("LegacyOptions", __base__=OptionGroup, **dict(_fields()))
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
