"""Options that are accepted and have no effect, from the rows of `config/compat/legacy.toml`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import create_model

from djl_trtllm.config.options.choices import Choice
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Scope, option
from djl_trtllm.config.tables import read_table

_TYPES: dict[str, type] = {"boolean": bool, "whole number": int, "number": float, "text": str, "path": Path}
_OF_THE_FIELD = ("type", "default", "after", "today", "djl", "warn", "scope", "aliases")
_OF_DJL_SERVING = ("djl_worker", "djl_server")

Row = dict[str, Any]


ROWS: dict[str, dict[str, Row]] = read_table("legacy.toml")
"""The rows of each group by field, in the order of the file."""


def _field(row: Row, group: str) -> tuple[Any, Any]:
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
