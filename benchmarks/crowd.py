"""What a well-behaved client notices of a crowd that is a burden: idle, slow, and flooding clients at once.

    python benchmarks/crowd.py [--idle 10000] [--readers 200] [--senders 100] [--flooders 20] [--seconds 20]
    python benchmarks/crowd.py --refusals [--seconds 20]

The engine is the scripted one with 50 steps per second, so that a first token takes 20 ms and more, as with a real one.
/ping is asked on a connection of its own each time. Server time is the CPU time that the server used until the answer,
for everything that it did meanwhile: what passes at most where it has a core of its own. With `--refusals`: how long
the server takes to refuse requests while 64 streams run and the queue is full.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from load import percentile
from rich.console import Console
from rich.table import Table
from servers import serving

from tests.support.behaved import Seen, Times, cpu_seconds, observe
from tests.support.client import raw_post, wordy
from tests.support.crowd import Crowd, crowded
from tests.support.models import scripted_model

REFUSALS = {
    "queue full": raw_post(json.dumps({"inputs": "the wolf"}).encode()),
    "not JSON": raw_post(b"{"),
    "no such path": raw_post(b"{}", path="/nowhere"),
    "address too long (414)": b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\n\r\n",
    "head too large (431)": b"GET / HTTP/1.1\r\nX: " + b"a" * 40_000 + b"\r\n\r\n",
    "too many headers (431)": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    "body too large (413)": raw_post(b"")[:-5] + b"99999999999\r\n\r\n",
}


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
        with crowded(server.port, crowd):
            row("crowd", observe(server, seconds))
        time.sleep(5)
        row("afterwards", observe(server, 5))
    return table


def refusals_table(folder: Path, seconds: float) -> Table:
    options = {"option.max_rolling_batch_size": 64, "job_queue_size": 1}
    model = scripted_model(folder / "model", {"steps_per_second": 50}, **options)
    title = "Refusals beside 3,200 tokens per second"
    table = Table("p50, p99 in ms", "status", "count", "passed", "server time", title=title)
    with serving(model, folder) as server:
        streams = [server.connect() for _ in range(65)]
        for stream in streams:
            stream.sendall(wordy(1_000_000))
            time.sleep(0.05)  # one that waits at most
        threading.Thread(target=_read, args=(streams,), daemon=True).start()
        for name, request in REFUSALS.items():
            times, status, end = Times(), "", time.monotonic() + seconds / len(REFUSALS)
            while time.monotonic() < end:
                with socket.create_connection(("127.0.0.1", server.port)) as connection:
                    started, before = time.perf_counter(), cpu_seconds(server.process.pid)
                    connection.sendall(request)
                    status = connection.recv(65536).split()[1].decode()
                    times.used.append(cpu_seconds(server.process.pid) - before)
                    times.passed.append(time.perf_counter() - started)
                time.sleep(0.002)
            shown = [
                ", ".join(milliseconds(each, share) for share in (0.5, 0.99)) for each in (times.passed, times.used)
            ]
            table.add_row(name, status, str(len(times.used)), *shown)
        for stream in streams:
            stream.close()
    return table


def _read(streams: list[socket.socket]) -> None:
    for stream in streams:
        stream.setblocking(False)
    while True:
        for stream in streams:
            try:
                stream.recv(1 << 16)
            except BlockingIOError:
                continue
            except OSError:
                return
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, count in vars(Crowd()).items():
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--refusals", action="store_true", help="measure refusals instead")
    arguments = parser.parse_args()
    crowd = Crowd(arguments.idle, arguments.readers, arguments.senders, arguments.flooders)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.refusals:
            table = refusals_table(Path(folder), arguments.seconds)
        else:
            table = crowd_table(Path(folder), crowd, arguments.seconds)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
