"""What a well-behaved client notices of a crowd that is a burden: idle, slow, and flooding clients at once.

    python -m benchmarks.crowd [--idle 10000] [--readers 200] [--senders 100] [--flooders 20] [--seconds 20]

The engine is the scripted one with 50 steps per second, so that a first token takes 20 ms and more, as with a real one.
/ping is asked on a connection of its own each time. Server time is the CPU time that the server used until the answer,
for everything that it did meanwhile: what passes at most where it has a core of its own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile
from benchmarks.servers import serving
from tests.support.floods import Crowd, flooded
from tests.support.hostile import Seen, observe
from tests.support.models import scripted_model


def milliseconds(values: list[float], share: float) -> str:
    return f"{percentile(values, share) * 1000:.1f}"


def crowd_table(folder: Path, crowd: Crowd, seconds: float) -> Table:
    options = {"option.max_rolling_batch_size": 512, "job_queue_size": 100}
    model = scripted_model(folder / "model", {"steps_per_second": 50}, **options)
    columns = ("/ping", "its server time", "first token", "its server time")
    table = Table("p50, p99, max in ms", *columns, "failed", "RSS MB", title=str(crowd))

    def row(name: str, seen: Seen) -> None:
        times = [each for kind in (seen.pings, seen.first_tokens) for each in (kind.passed, kind.used)]
        shown = [", ".join(milliseconds(each, share) for share in (0.5, 0.99, 1)) for each in times]
        asked = len(seen.pings.passed) + len(seen.first_tokens.passed) + len(seen.failures)
        table.add_row(name, *shown, f"{len(seen.failures)} of {asked}", f"{seen.rss / 1e6:.0f}")
        if seen.failures:
            print(name, "failed first with", seen.failures[0], file=sys.stderr)

    with serving(model, folder) as server:
        observe(server, 2)
        row("quiet", observe(server, seconds))
        with flooded(server.port, crowd.numbers):
            row("crowd", observe(server, seconds))
        time.sleep(5)
        row("afterwards", observe(server, 5))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in vars(Crowd()).items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    crowd = Crowd(arguments.idle, arguments.readers, arguments.senders, arguments.flooders)
    with tempfile.TemporaryDirectory() as folder:
        table = crowd_table(Path(folder), crowd, arguments.seconds)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
