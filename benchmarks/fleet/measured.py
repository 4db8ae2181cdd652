"""Servers of this machine, and the simulation of them, under the same requests: one alone, and a fleet.

A replica is a server with the scripted executor. The project's router (`djl_trtllm.routing`) chooses one for each
request by what the servers report each second, and a rule says how many there are to be. In a fleet it is the rule for
Ray, clients send again what was refused or cut, and one replica is killed and replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import orjson

from benchmarks.fleet.arrivals import Lengths, Request, arrivals, burst
from benchmarks.fleet.replica import Scripted
from benchmarks.fleet.rules import Figures, Fixed, Ray, Rule
from benchmarks.fleet.simulation import SCRAPE_SECONDS, ColdStart, Fleet, Result, Simulation, Troubles
from benchmarks.load import percentile
from benchmarks.servers import Server, serving
from djl_trtllm.bench.client import Client, Stream, Target, TokenReader, clock
from djl_trtllm.routing import fleet as routing
from tests.support.models import PROMPT, scripted_model

_SLACK = 4
_REPORT_SECONDS = 1.0
_GAUGE = re.compile(r"^djl_trtllm_(waiting|running)(?:\{[^}]*\})? (\d+)", re.MULTILINE)
PLACES, OUTPUT = 16, 40
"""Places of a replica, and mean output tokens of a request."""


@dataclass(frozen=True)
class Case:
    """What is compared: `share` of what the least fleet carries comes, and from 10 s on as much for the most."""

    steps_per_second: float
    queue: int
    share: float
    least: int = 1
    most: int = 1
    troubles: Troubles = field(default_factory=Troubles)

    def rule(self) -> Rule:
        return Fixed(self.least) if self.least == self.most else Ray(self.least, self.most, round(0.7 * PLACES))

    def requests(self, seconds: float, seed: int) -> list[Request]:
        lengths = Lengths(prompt=1, output=OUTPUT)
        carried = self.share * PLACES * self.steps_per_second / lengths.output
        rate = burst(self.least * carried, self.most / self.least, 10.0, seconds)
        return list(arrivals(rate, self.most * carried, seconds, lengths, seed))


ALONE = Case(40.0, 100_000, 0.85)
FLEET = Case(20.0, 16, 0.7, 2, 4, Troubles(attempts=5, pause=1.0, deaths=(90.0,)))


@dataclass(frozen=True)
class Row:
    """A figure of both."""

    name: str
    simulated: float
    measured: float

    @property
    def off(self) -> float:
        """The difference as a share of the measured value."""
        return abs(self.simulated - self.measured) / (self.measured or 1)


@dataclass
class Measured:
    """The ends of the requests, and the seconds that each replica took to start."""

    result: Result
    starts: Sequence[float] = ()


Measure = Callable[[Sequence[Request]], Measured]
"""Sends requests to servers at their times."""


def compare(case: Case, seconds: float, seed: int, measure: Measure | None = None) -> list[Row]:
    """Send the requests to servers, and simulate them with their cold starts. Without `measure` they are real ones."""
    planned = case.requests(seconds, seed)
    again = [replace(each) for each in planned]
    measured = asyncio.run(_measure(case, again, seconds)) if measure is None else measure(again)
    # The first ones are there at the beginning.
    later = measured.starts[case.least :]
    cold_start = ColdStart(0, 0, 0, statistics.mean(later) if later else 0.0)
    fleet = Fleet(Scripted(case.steps_per_second), PLACES, PLACES, case.queue, cold_start, drain=0)
    simulation = Simulation(fleet, case.rule(), end=seconds, troubles=case.troubles)
    simulated = simulation.run([replace(each) for each in planned])
    figures = [_figures(each) for each in (simulated, measured.result)]
    given = [Row("seconds of a cold start, as measured", *[cold_start.seconds] * 2)] if later else []
    return given + [Row(name, *(each[name] for each in figures)) for name in figures[1]]


def _figures(result: Result) -> dict[str, float]:
    done = result.of("complete")
    whole = sorted(each.ended - each.arrived for each in done if each.ended is not None)
    first = result.first_tokens()
    return {
        "output tokens": sum(each.output_tokens for each in done),
        "seconds of a request, mean": statistics.mean(whole),
        "seconds of a request, p99": percentile(whole, 0.99),
        "time to first token, mean": statistics.mean(first),
        "time to first token, p99": percentile(first, 0.99),
        "attempts that were refused": result.attempts["refused"],
        "attempts that were cut": result.attempts["cut"],
        "requests that were given up": len(result.requests) - len(done),
    } | (
        {"replicas that are ready or starting, mean": result.replica_seconds / result.seconds} if result.seconds else {}
    )


@dataclass
class _Replica:
    """A server, and its last report to the router."""

    name: str
    server: Server
    client: Client
    received: int = 0
    load: routing.Load = field(default_factory=routing.Load)
    figures: Figures = field(default_factory=lambda: Figures(0, 0, PLACES))

    async def report(self, client: httpx.AsyncClient) -> None:
        """Note what the server says of itself; what it does not say stays as it was."""
        received = self.received
        with contextlib.suppress(httpx.HTTPError):
            page = (await client.get(f"http://127.0.0.1:{self.server.port}/metrics")).text
            found = Counter({name: int(value) for name, value in _GAUGE.findall(page)})
            self.load = routing.Load(found["waiting"] + found["running"], received)
            self.figures = Figures(found["waiting"], found["running"], PLACES)


class _Servers:
    """The fleet: it grows by the rule, and by one for each replica that dies."""

    def __init__(self, case: Case, model: Path, folder: Path, seconds: float) -> None:
        self.starts: list[float] = []
        self._case = case
        self.result = Result(0.0, seconds)
        self._model, self._folder = model, folder
        self._stack = contextlib.ExitStack()
        self._ready: dict[str, _Replica] = {}
        self._starting = 0
        self._count = 0
        self._router = routing.Fleet(_SLACK)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, planned: Sequence[Request]) -> Result:
        """Send all requests at their times."""
        try:
            await asyncio.gather(*(self._start() for _ in range(self._case.least)))
            self._begin = clock() + 0.5
            self._background(self._report())
            self._background(self._decide())
            for at in self._case.troubles.deaths:
                self._background(self._die(at))
            await asyncio.gather(*map(self._one, planned))
            return self.result
        finally:
            for task in self._tasks:
                task.cancel()
            self._router.update({}, ())
            for replica in self._ready.values():
                replica.client.close()
            await asyncio.to_thread(self._stack.close)

    def _background(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _now(self) -> float:
        return clock() - self._begin

    # -- replicas ------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._starting += 1
        self._count += 1
        name, began = f"replica-{self._count}", clock()
        folder = self._folder / name
        folder.mkdir()
        server = await asyncio.to_thread(self._stack.enter_context, serving(self._model, folder))
        self.starts.append(clock() - began)
        self._starting -= 1
        self._ready[name] = _Replica(name, server, Client(Target("127.0.0.1", server.port), 300))
        self._update()

    def _update(self) -> None:
        self._router.update({each.name: ("127.0.0.1", each.server.port) for each in self._ready.values()}, self._ready)

    async def _report(self) -> None:
        async with httpx.AsyncClient(timeout=_REPORT_SECONDS) as client:
            while True:
                await asyncio.gather(*(each.report(client) for each in list(self._ready.values())))
                await asyncio.sleep(_REPORT_SECONDS)

    async def _decide(self) -> None:
        """As the simulation does it: by the figures of the scrape before."""
        rule, scraped, before = self._case.rule(), list[Figures](), 0.0
        for number in range(1, 1000):
            await asyncio.sleep(self._begin + number * SCRAPE_SECONDS - clock())
            there = len(self._ready) + self._starting
            if (now := self._now()) <= self.result.end + 1:
                self.result.replica_seconds += there * (now - before)
                self.result.seconds, before = now, now
            wanted = rule.wanted(self._now(), there, scraped) if scraped else there
            scraped = [each.figures for each in self._ready.values()]
            for _ in range(wanted - there):
                self._background(self._start())

    async def _die(self, at: float) -> None:
        await asyncio.sleep(self._begin + at - clock())
        replica = self._ready.pop(next(iter(self._ready)))
        replica.server.process.kill()
        self._update()
        await self._start()

    # -- clients -------------------------------------------------------------------------------------------------------

    async def _one(self, request: Request) -> None:
        self.result.requests.append(request)
        await asyncio.sleep(self._begin + request.arrived - clock())
        troubles = self._case.troubles
        while request.attempts < troubles.attempts:
            request.attempts += 1
            stream = await self._attempt(request)
            outcome = "complete" if stream.error is None else "refused" if stream.error.startswith("HTTP") else "cut"
            request.outcome, request.ended = outcome, self._now()
            self.result.attempts[outcome] += 1
            if outcome == "complete":
                request.first_token = stream.times[0] - self._begin
                return
            await asyncio.sleep(troubles.pause * 2 ** (request.attempts - 1))

    async def _attempt(self, request: Request) -> Stream:
        question = routing.Question.of(b"")
        self._router.route(question, {each.name: each.load for each in self._ready.values()})
        replica = self._ready[question.replica]
        replica.received += 1
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": request.output_tokens}, "stream": True}
        reader = TokenReader(Stream(clock()))
        await replica.client.send(replica.client.target.request("/invocations", orjson.dumps(body)), reader)
        return reader.stream


async def _measure(case: Case, planned: Sequence[Request], seconds: float) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        options = {"option.max_rolling_batch_size": PLACES, "job_queue_size": case.queue}
        script = {"steps_per_second": case.steps_per_second, "max_sequences": PLACES}
        model = scripted_model(Path(folder) / "model", script, **options)
        servers = _Servers(case, model, Path(folder), seconds)
        return Measured(await servers.run(planned), servers.starts)
