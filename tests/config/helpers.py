"""Shared by the tests of this folder."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping

import pytest
from rich.console import Console
from rich.table import Table

from djl_trtllm.config import Config, Layer, parse_properties, read_environment, resolve
from djl_trtllm.errors import ConfigError


def from_text(text: str, environ: Mapping[str, str] | None = None, **others: str) -> Config:
    """Resolve a serving.properties of this text, an environment and a config.properties of the server."""
    sources = [*read_environment(environ or {}), parse_properties(text, "serving.properties")]
    if "server" in others:
        sources.append(parse_properties(others["server"], "config.properties", Layer.SERVER_FILE))
    return resolve(sources)


def problems_of(text: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_text(text, environ)
    return caught.value.problems


def printed(table: Table, width: int = 300, *, styles: bool = False) -> str:
    """A table as a terminal of this width shows it."""
    console = Console(width=width, record=True, file=io.StringIO(), force_terminal=styles, color_system="standard")
    console.print(table)
    return console.export_text(styles=styles)


def rows(text: str) -> list[list[str]]:
    """The cells of a table, its heading first; a cell that was folded is put together again."""
    found: list[list[str]] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│┃]", line)[1:-1]]
        if cells and (cells[0] or not found):
            found.append(cells)
        elif cells:
            found[-1] = [before + more for before, more in zip(found[-1], cells, strict=True)]
    return found
