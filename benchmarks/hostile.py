"""What hostile requests cost a server: how long each refusal takes, and what everybody else notices meanwhile.

    python -m benchmarks.hostile [--seconds 5] [--only TEXT] [--saturated] [--floods]

Each request of `tests/support/hostile.py` is sent again and again, one after the other. `refusal` is the time from the
last byte that the server took to the first byte of its response. `stall` is the time of a /ping on a connection of its
own meanwhile: nothing but the event loop is between. CPU is what the server used for each, of all its threads: the time
where it has a core of its own, also on a machine that others use. `loop` is the event loop's part of it. With
`--saturated` 64 streams run and the queue is full, so that what would be served is refused, too.

With `--floods` there are the floods of `tests/support/floods.py` instead, of 20 clients each, from a process of its
own: over HTTP, WebSockets and gRPC. Then `RSS` is the largest, also a second after the flood.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile
from benchmarks.servers import Server, free_port, serving
from tests.support.client import PING, wordy
from tests.support.floods import FLOODS, GRPC, flooded
from tests.support.hostile import Hostile, Times, loop_seconds, requests, send
from tests.support.pings import cpu_seconds
from tests.support.vision import seeing_model

_STREAMS = 64
_FLOODING = 20
_PAUSE = 0.0005
_PING_PAUSE = 0.001


def milliseconds(values: list[float], *shares: float) -> str:
    return ", ".join(f"{percentile(values, share) * 1000:.1f}" for share in shares)


def _watch(port: int, pid: int, results: Connection) -> None:
    """Ask for /ping until `results` has a message, in a process of its own: sending megabytes would delay it."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        seen = Times()
        while not results.poll():
            started, before = time.perf_counter(), cpu_seconds(pid)
            connection.sendall(PING)
            connection.recv(4096)
            seen.used.append(cpu_seconds(pid) - before)
            seen.passed.append(time.perf_counter() - started)
            time.sleep(_PING_PAUSE)
    results.send(seen)


@contextlib.contextmanager
def pinged(server: Server, seen: Times) -> Iterator[None]:
    """What a client of /ping sees until the block ends."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_watch, args=(server.port, server.process.pid, theirs), daemon=True)
    process.start()
    try:
        yield
    finally:
        ours.send(None)
        found: Times = ours.recv()
        seen.passed += found.passed
        seen.used += found.used
        process.join()


@contextlib.contextmanager
def saturated(server: Server) -> Iterator[None]:
    """As many streams as the engine takes run, and as many wait as may."""
    streams = [server.connect() for _ in range(_STREAMS + 1)]
    for stream in streams:
        stream.sendall(wordy(1_000_000))
        time.sleep(0.05)  # one that waits at most
    ended = threading.Event()
    reader = threading.Thread(target=_read, args=(streams, ended))
    reader.start()
    try:
        yield
    finally:
        ended.set()
        reader.join()
        for stream in streams:
            stream.close()


def _read(streams: list[socket.socket], ended: threading.Event) -> None:
    for stream in streams:
        stream.setblocking(False)
    while not ended.wait(0.05):
        for stream in streams:
            with contextlib.suppress(BlockingIOError):
                stream.recv(1 << 16)


def measure(server: Server, request: Hostile, seconds: float) -> tuple[str, ...]:
    """A row of the table."""
    times, pings, statuses, largest = Times(), Times(), set(), 0
    loop: list[float] = []
    with pinged(server, pings):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before, turning = cpu_seconds(server.process.pid), loop_seconds(server.process.pid)
            status, passed = send(server.port, request.data)
            times.used.append(cpu_seconds(server.process.pid) - before)
            loop.append(loop_seconds(server.process.pid) - turning)
            times.passed.append(passed)
            statuses.add(str(status))
            largest = max(largest, server.process.memory_info().rss)
            time.sleep(_PAUSE)
    return (
        ", ".join(sorted(statuses)),
        str(len(times.passed)),
        *(milliseconds(each, 0.5, 0.99) for each in (times.passed, times.used)),
        milliseconds(loop, 0.5, 0.99, 1),
        *(milliseconds(each, 0.5, 0.999, 1) for each in (pings.passed, pings.used)),
        f"{largest / 1e6:.0f}",
    )


def flood(server: Server, kind: str, port: int, seconds: float) -> tuple[str, ...]:
    """A row of the table of floods."""
    pings = Times()
    largest = server.process.memory_info().rss
    with pinged(server, pings):
        with flooded(port, {kind: _FLOODING}) as count:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                largest = max(largest, server.process.memory_info().rss)
                time.sleep(0.05)
        time.sleep(1)
        largest = max(largest, server.process.memory_info().rss)
    stalls = (milliseconds(each, 0.5, 0.999, 1) for each in (pings.passed, pings.used))
    return ", ".join(f"{what}: {number}" for what, number in count.most_common(3)), *stalls, f"{largest / 1e6:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each request")
    parser.add_argument("--only", default="", help="requests with this text in their name")
    parser.add_argument("--saturated", action="store_true", help="with a busy engine and a full queue")
    parser.add_argument("--floods", action="store_true", help="many clients at once")
    arguments = parser.parse_args()
    options: dict[str, object] = {"option.allowed_media_domains": "localhost"}
    if arguments.saturated:
        options |= {"option.max_rolling_batch_size": _STREAMS, "job_queue_size": 1}
    title = "64 streams run, the queue is full" if arguments.saturated else "the server is idle"
    stall = ("stall p50, p99.9, max", "CPU", "RSS MB")
    columns = (
        ("came of it", *stall)
        if arguments.floods
        else ("status", "sent", "refusal p50, p99", "CPU", "loop p50, p99, max", *stall)
    )
    table = Table("ms", *columns, title=title)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = seeing_model(folder / "model", {"steps_per_second": 50}, **options)
        grpc_port = free_port()
        server = stack.enter_context(serving(model, folder, SERVING_TRITON_GRPC_PORT=str(grpc_port)))
        if arguments.saturated:
            stack.enter_context(saturated(server))
        if arguments.floods:
            for kind in FLOODS:
                if arguments.only in kind:
                    port = grpc_port if kind in GRPC else server.port
                    table.add_row(kind, *flood(server, kind, port, arguments.seconds))
        else:
            nothing = Hostile("nothing but /ping", 200, PING)
            for request in (nothing, *requests()):
                if request is nothing or arguments.only in request.name:
                    table.add_row(request.name, *measure(server, request, arguments.seconds))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
