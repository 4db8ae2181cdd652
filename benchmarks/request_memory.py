"""Memory of a request in the server: a connection without one, waiting, running, and after its end.

    python -m benchmarks.request_memory [--requests 10000] [--before CHECKOUT]

Each row is the resident memory of the server above that of the server before any request, and the same divided by the
number of connections; each connection has one streaming request of a short prompt. They wait behind one that does not
end, or all run at once on the scripted executor. After their clients have left, twice, what stays is what the server
keeps of requests, and memory that the allocator does not give back. With `--before` the server of another checkout is
measured after this one's.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.servers import Server, serving
from djl_trtllm.processes import raise_limit
from tests.support.client import body, raw_post
from tests.support.models import scripted_model
from tests.support.processes import wait_until

NEVER_ENDING = raw_post(body(1_000_000, stream=True))
STEPS_PER_SECOND = 0.5
SETTLED_SECONDS = 1.0
MB = 1e6


@contextmanager
def connections(server: Server, count: int, content: bytes = b"") -> Iterator[None]:
    """This number of connections, each of which has sent `content`, until the block ends."""
    with ExitStack() as stack:
        for _ in range(count):
            connection = stack.enter_context(closing(socket.create_connection(("127.0.0.1", server.port))))
            connection.sendall(content)
        yield


def resident(server: Server) -> int:
    """Bytes, when nothing is about to change."""
    time.sleep(SETTLED_SECONDS)
    return int(server.process.memory_info().rss)


def measured(folder: Path, requests: int, code: Path | None) -> dict[str, int]:
    """Resident bytes of the server in each state, above those before any request."""
    environ = {} if code is None else {"PYTHONPATH": str(code), "PYTHONSAFEPATH": "1"}
    limits = {"job_queue_size": requests, "max_connections": requests + 100, "predict_timeout": 3600}
    found: dict[str, int] = {}

    def started(sequences: int) -> Server:
        script = {"steps_per_second": STEPS_PER_SECOND, "max_sequences": sequences}
        options = {"option.max_rolling_batch_size": sequences, **limits}
        return serving(scripted_model(folder / f"{sequences}", script, **options), folder, **environ)

    with started(1) as server, connections(server, 1, NEVER_ENDING):
        wait_until(lambda: server.metric("running") == 1)
        idle = resident(server)
        with connections(server, requests):
            found["a connection"] = resident(server) - idle
        for again in ("", ", again"):
            with connections(server, requests, NEVER_ENDING):
                wait_until(lambda: server.metric("waiting") == requests, 300)
                found[f"waiting{again}"] = resident(server) - idle
            wait_until(lambda: server.metric("waiting") == 0, 300)
            found[f"after it{again}"] = resident(server) - idle
    with started(requests) as server:
        idle = resident(server)
        with connections(server, requests, NEVER_ENDING):
            wait_until(lambda: server.metric("running") == requests, 300)
            found["running"] = resident(server) - idle
        wait_until(lambda: server.metric("running") == 0, 300)
        found["after running"] = resident(server) - idle
    return found


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--before", type=Path, help="another checkout")
    arguments = parser.parse_args()
    if raise_limit(arguments.requests + 200) < arguments.requests + 200:
        sys.exit(f"{arguments.requests} connections need as many file descriptors (ulimit -Hn)")
    trees = [None] if arguments.before is None else [None, arguments.before.resolve()]
    columns: list[dict[str, int]] = []
    for code in trees:
        with tempfile.TemporaryDirectory() as folder:
            columns.append(measured(Path(folder), arguments.requests, code))
    names = [name for code in trees for name in (("now" if code is None else "before") + " MB", "bytes of each")]
    table = Table("state", *names, title=f"{arguments.requests:,} requests: memory of the server above none")
    for state in columns[0]:
        cells = [(f"{found[state] / MB:.1f}", f"{found[state] / arguments.requests:,.0f}") for found in columns]
        table.add_row(state, *(cell for pair in cells for cell in pair))
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
