"""The table of faults.

python -m tests.faults [KIND ...] [--engine ENGINE ...] [--streams 64] [--times 10] [--seconds 20]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path

from tests.faults.kinds import KINDS
from tests.faults.load import Case, Kind, Row

_WIDTHS = (46, 13, -12, -8, -12, -15, -15, -15, -6, -12)
"""The widths of the columns; those that are negative are aligned to the right."""
SECONDS = 20.0
ENGINES = ("scripted", "openvino", "tensorrt_llm")
HEADER = (
    "fault",
    "engine",
    "failed",
    "refused",
    "recovered s",
    "worst /ping ms",
    "p99.9 /ping ms",
    "of its CPU, ms",
    "/pings",
    "peak RSS MB",
)


def rows_of(
    kind: Kind, engine: str, streams: int, times: int, *, short: bool = False, seconds: float = SECONDS
) -> Generator[Row, None, None]:
    """Run a kind on an engine."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        yield from kind.run(Case(engine, streams, times, Path(folder), short, seconds))


def line(cells: Sequence[str]) -> str:
    """A line of the table; what has no column follows."""
    fitted = [
        cell.ljust(width) if width > 0 else cell.rjust(-width) for cell, width in zip(cells, _WIDTHS, strict=False)
    ]
    return " ".join([*fitted, *cells[len(_WIDTHS) :]]).rstrip()


def shown(row: Row) -> str:
    """A row as a line of the table."""
    failed = f"{row.failed} of {row.requests}" if row.requests else f"{row.failed}"
    pings = [f"{seconds * 1e3:.0f}" for seconds in (row.ping, row.ping_late, row.ping_used)]
    figures = (f"{row.refused}", f"{row.recovered:.2f}", *pings, f"{row.pings}", f"{row.memory / 1e6:.0f}")
    return line((row.fault, row.engine, failed, *figures, f" {row.note}"))


def main() -> int:
    """Print the table; 1 if more requests failed than may, or memory grew too much."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="What faults cost.")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; all if none is named")
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--times", type=int, default=10, help="faults in a row, where the kind repeats them")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long clients and model stores go on")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    print(line(HEADER))
    worst = 0
    for name in arguments.kinds or KINDS:
        for engine in arguments.engine or ENGINES:
            if engine in KINDS[name].engines:
                rows = rows_of(KINDS[name], engine, arguments.streams, arguments.times, seconds=arguments.seconds)
                for row in rows:
                    print(shown(row), flush=True)
                    worst |= not row.passed
    return int(worst)


if __name__ == "__main__":
    sys.exit(main())
