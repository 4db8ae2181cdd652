"""Text for terminals and pipes: wrapped at a terminal's width between words, one line per item elsewhere.

Columns, and numbers and durations with three digits, look the same in all reports.
"""

import difflib
import math
import re
import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text

_INDENT = "  "
_START = re.compile(r"^\s*(?:- )?")


def wrapped(text: str, width: int | None, *, indent: str = "") -> str:
    """Wrap `text` into lines of at most `width` characters; None leaves it as it is.

    Lines after the first begin with `indent`, and with more where they continue a line that is indented or begins with
    a hyphen. Words are not broken: a path that is longer than a line stays whole. Line breaks of the text stay.
    """
    if width is None:
        return text
    lines = []
    for number, line in enumerate(text.split("\n")):
        own = " " * len(_START.findall(line)[0])
        lines += textwrap.wrap(
            line,
            width,
            initial_indent="" if not number else indent,
            subsequent_indent=indent + own,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return "\n".join(lines)


class Listing:
    """A list of items: a heading each, and named details below it."""

    def __init__(self, title: str, width: int | None) -> None:
        self._width = width
        self.text = Text(wrapped(title, width))

    def space(self) -> None:
        self.text.append("\n")

    def item(self, heading: str, details: dict[str, str], *, dim: bool = False) -> None:
        """Add an item; its details are in one column, and empty ones are left out."""
        self.text.append("\n" + wrapped(heading, self._width, indent=_INDENT * 2), "dim" if dim else "bold")
        longest = max((len(name) for name in details), default=0)
        for name, detail in details.items():
            if detail:
                start = f"{_INDENT}{name.ljust(longest)}{_INDENT}"
                # textwrap drops white space at the start of a line: a stand-in keeps the column.
                line = wrapped("." * len(start) + detail, self._width, indent=" " * len(start))
                self.text.append("\n" + start + line[len(start) :], "dim" if dim else "")


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Return rows as lines with aligned columns; `right` has the numbers of right-aligned columns."""
    widths = [max(len(row[number]) for row in rows) for number in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def suggestion(given: str, known: Iterable[str], *, most: int = 1, likeness: float = 0.6) -> str:
    """The part of a message that names the `known` names most like `given`, or all of them if none is like it."""
    names = list(known)
    near = difflib.get_close_matches(given, names, most, likeness)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names)}"


def seconds(value: float) -> str:
    """A duration with a unit and three digits."""
    if not math.isfinite(value):
        return "-"
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{1000 * value:.3g} ms"


def number(value: float) -> str:
    """A number with three digits or more, without an exponent."""
    if not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def dollars(value: float | None) -> str:
    """A price with two decimals, "" for None."""
    return "" if value is None else f"{value:.2f}"
