"""Compare two resolved configurations; secrets are masked."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.explain import plain_value, shown_origin, shown_value
from djl_trtllm.config.options.registry import OPTIONS, DeclaredOption
from djl_trtllm.listing import Listing


def differences(first: Config, second: Config) -> list[DeclaredOption]:
    """The options whose values differ, in the order of the documents."""
    return [
        declared for name, declared in OPTIONS.items() if getattr(first.options, name) != getattr(second.options, name)
    ]


def render_diff(first: Config, second: Config, names: tuple[str, str], width: int | None = None) -> Text:
    """A list of the differences, with `names` for the two sides, wrapped at `width`, if it is given."""
    found = differences(first, second)
    listing = Listing(f"{names[0]} and {names[1]}: " + (f"{len(found)} options differ" if found else "the same"), width)
    for declared in found:
        listing.space()
        listing.item(
            declared.key,
            {
                name: f"{shown_value(declared, getattr(side.options, declared.name))} ({shown_origin(side, declared)})"
                for name, side in zip(("first", "second"), (first, second), strict=True)
            },
        )
    return listing.text


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
