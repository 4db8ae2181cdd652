"""Compare two resolved configurations; secrets are masked."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.explain import plain_value, shown_origin, shown_value
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption


def differences(first: Config, second: Config) -> list[DeclaredOption]:
    """The options whose values differ, in the order of the documents."""
    return [
        declared for name, declared in OPTIONS.items() if getattr(first.options, name) != getattr(second.options, name)
    ]


def render_diff(first: Config, second: Config, names: tuple[str, str]) -> Table:
    """A rich table of the differences, with `names` as the headings of the two sides."""
    table = Table(title=f"{names[0]} and {names[1]}", title_justify="left")
    table.add_column("option", no_wrap=True)
    for name in names:
        table.add_column(f"value in {name}", overflow="fold")
        table.add_column("from", overflow="fold")
    for declared in differences(first, second):
        cells = [declared.key]
        for side in (first, second):
            cells += [shown_value(declared, getattr(side.options, declared.name)), shown_origin(side, declared)]
        table.add_row(*map(Text, cells))
    return table


def diff_as_json(first: Config, second: Config) -> dict[str, Any]:
    """The same for programs: by field name, `key` and a list of two sides with `value` and `origin`."""
    return {
        declared.name: {
            "key": declared.key,
            "sides": [
                {
                    "value": plain_value(declared, getattr(side.options, declared.name)),
                    "origin": shown_origin(side, declared),
                }
                for side in (first, second)
            ],
        }
        for declared in differences(first, second)
    }
