"""Sends made requests to a server, and looks at what is left of them."""

from __future__ import annotations

import asyncio
import collections
import itertools
import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.faults.fuzz.clients import Client
from tests.faults.fuzz.grammar import Grammar, Way
from tests.support.models import scripted_model
from tests.support.server import Server, free_port

_AT_ONCE = 32
_ANSWER_SECONDS = 60
_LOOKS = 10
_MEGABYTES_MORE = 64
DEFECTS = ("500", "INTERNAL", "UNKNOWN", "0")
"""Statuses that no request may have. `0` is no status."""
_SHOWN_LINES = 40


@dataclass
class Outcome:
    """What came of the requests. `wrong` are those that broke a rule."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    ways: collections.Counter[Way] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Megabytes of the server and its engine process: at rest, and after each tenth of the requests, and at the end."""


def fuzz_requests(count: int, seed: int = 0, seconds: float = math.inf) -> Outcome:
    """Send `count` requests to a server, or as many as there is time for."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        model = scripted_model(Path(folder) / "model", {"steps_per_second": 5000}, **{"option.max_output_len": 64})
        grpc_port = free_port()
        with Server(model, {"SERVING_TRITON_GRPC_PORT": str(grpc_port)}) as server:
            server.wait_for_ping()
            server.note_rest()
            outcome.memory.append(_megabytes(server))
            asyncio.run(_send(server, grpc_port, Grammar(seed), count, outcome, time.monotonic() + seconds))
            outcome.wrong += _left(server, outcome)
    return outcome


async def _send(
    server: Server, grpc_port: int, grammar: Grammar, count: int, outcome: Outcome, end_time: float
) -> None:
    left = itertools.takewhile(lambda _: time.monotonic() < end_time, range(count))
    looks = {count * look // _LOOKS - 1 for look in range(1, _LOOKS + 1)}

    async def client() -> None:
        async with Client(server.port, grpc_port) as sender:
            for number in left:
                made = grammar.request()
                try:
                    status, end = await asyncio.wait_for(sender.send(made), _ANSWER_SECONDS)
                except (asyncio.TimeoutError, OSError, ValueError) as error:
                    sender.give_up()
                    status, end = "0", repr(error).encode()
                outcome.statuses[status] += 1
                outcome.ways[made.way] += 1
                if status in DEFECTS:
                    outcome.wrong.append(f"{status} {made.way} {made.target} {made.data[:900]!r}: {end!r}")
                if number in looks:
                    outcome.memory.append(_megabytes(server))

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))


def _left(server: Server, outcome: Outcome) -> list[str]:
    server.check_leaks()
    wrong = []
    if server.ping() != 200:
        wrong.append(f"/ping is {server.ping()}")
    log = server.log
    if tracebacks := [number for number, line in enumerate(log) if "Traceback" in line]:
        shown = log[max(tracebacks[0] - 2, 0) : tracebacks[0] + _SHOWN_LINES]
        wrong.append("\n".join([f"{len(tracebacks)} tracebacks in the log, the first:", *shown]))
    if restarts := server.metric("executor_restarts_total"):
        wrong.append(f"{restarts:.0f} engine processes ended")
    outcome.memory.append(_megabytes(server))
    first, half, last = outcome.memory[1], outcome.memory[len(outcome.memory) // 2], outcome.memory[-1]
    if last > max(first, half) + _MEGABYTES_MORE:
        wrong.append(f"the server grew: {outcome.memory} MB")
    return wrong


def _megabytes(server: Server) -> int:
    processes: list[psutil.Process] = [server.process, *server.descendants()]
    return sum(int(process.memory_info().rss) for process in processes) >> 20
