"""Compare two resolved configurations; secrets are masked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.explain import plain_value, shown_origin, shown_value
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption


@dataclass(frozen=True)
class Difference:
    """One option whose value differs between a `first` and a `second` configuration."""

    declared: DeclaredOption
    first: Config
    second: Config

    @property
    def sides(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Value and origin on each side, as text."""
        name = self.declared.name
        one, other = (
            (shown_value(self.declared, getattr(side.options, name)), shown_origin(side, self.declared))
            for side in (self.first, self.second)
        )
        return one, other


def differences(first: Config, second: Config) -> tuple[Difference, ...]:
    """Every option whose value differs, in the order of the documents."""
    return tuple(
        Difference(declared, first, second)
        for name, declared in OPTIONS.items()
        if getattr(first.options, name) != getattr(second.options, name)
    )


def render_diff(first: Config, second: Config, names: tuple[str, str]) -> Table:
    """A rich table of the differences, with `names` as the headings of the two sides."""
    table = Table(title=f"{names[0]} and {names[1]}", title_justify="left")
    table.add_column("option", no_wrap=True)
    for name in names:
        table.add_column(f"value in {name}", overflow="fold")
        table.add_column("from", overflow="fold")
    for difference in differences(first, second):
        cells = [Text(cell) for side in difference.sides for cell in side]
        table.add_row(Text(difference.declared.key), *cells)
    return table


def diff_as_json(first: Config, second: Config) -> dict[str, Any]:
    """The same for programs: by field name, `key` and a list of two sides with `value` and `origin`."""
    return {
        found.declared.name: {
            "key": found.declared.key,
            "sides": [
                {
                    "value": plain_value(found.declared, getattr(side.options, found.declared.name)),
                    "origin": shown_origin(side, found.declared),
                }
                for side in (first, second)
            ],
        }
        for found in differences(first, second)
    }
