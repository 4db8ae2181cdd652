"""Puts a load on a server: closed loop (clients that send when the last response is complete) or open loop (a rate)."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from djl_trtllm.bench.apis import Prompt, Requests
from djl_trtllm.bench.client import Stream, clock
from djl_trtllm.bench.figures import Figures, Objectives

_TICK = 0.25
_PAUSE = 0.1
"""Seconds that a client of a closed loop waits after a failure, so that a dead server costs no core."""
_MOST_FAILURES = 50
MOST_IN_FLIGHT = 4096
"""Requests of an open loop at once; others wait in the client, which is part of their latency."""
BUSY = 0.85
"""Share of a core above which the client may be what limits the measurement."""


@dataclass(frozen=True)
class Load:
    """A load: `concurrency` clients, or `rate` requests per second, for `duration` seconds or `requests` requests.

    Both begin after `warmup` seconds of the same load. `drain` is how long the last requests may take.
    """

    concurrency: int | None = None
    rate: float | None = None
    duration: float | None = 10.0
    requests: int | None = None
    warmup: float = 2.0
    drain: float = 60.0
    objectives: Objectives = field(default_factory=Objectives)

    @property
    def label(self) -> str:
        if self.rate is not None:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} client" + "s" * (self.concurrency != 1)


@dataclass
class Progress:
    """The state of the load that runs."""

    load: Load
    figures: Figures
    in_flight: int = 0
    tokens_per_second: float = 0.0
    since: float = 0.0
    phase: str = "warm-up"


Show = Callable[[Progress], None]


class Run:
    """One load from its warm-up to its last response."""

    def __init__(
        self, load: Load, requests: Requests, prompts: Iterator[Prompt], stop: asyncio.Event, chance: random.Random
    ) -> None:
        self._load, self._requests, self._prompts = load, requests, prompts
        self._stop = stop
        self._chance = chance
        self._started = clock()
        self._figures = figures = Figures(load.label, self._started + load.warmup, load.objectives)
        figures.concurrency, figures.rate = load.concurrency, load.rate
        self._until = figures.begin + load.duration if load.duration is not None else math.inf
        self._live: set[Stream] = set()
        self._left = load.requests if load.requests is not None else -1
        self._failures = 0.0
        """Failures before the first success: a server that only refuses ends the load."""
        self._last = figures.begin

    async def measure(self, show: Show) -> Figures:
        """Run the load, showing its progress four times a second."""
        figures = self._figures
        ticker = asyncio.ensure_future(self._tick(show))
        sending = asyncio.ensure_future(self._closed() if self._load.rate is None else self._open())
        stopped = asyncio.ensure_future(self._stop.wait())
        try:
            limit = self._until + self._load.drain - clock()
            await asyncio.wait(
                {sending, stopped}, timeout=None if limit == math.inf else limit, return_when=asyncio.FIRST_COMPLETED
            )
            figures.complete = not self._stop.is_set() and self._failures < _MOST_FAILURES
        finally:
            for task in (sending, stopped, ticker):
                task.cancel()
            results = await asyncio.gather(sending, stopped, ticker, return_exceptions=True)
        figures.end = self._end()
        for stream in list(self._live):
            figures.add(stream, figures.end)
        self._requests.client.close()
        for result in results:
            if isinstance(result, Exception):
                raise result
        return figures

    def _end(self) -> float:
        now = clock()
        if self._load.requests is not None and not self._left:
            # Tokens over wall time: up to the last one.
            return min(now, self._last + 1e-9, self._until)
        return max(self._figures.begin, min(now, self._until))

    # -- sending -------------------------------------------------------------------------------------------------------

    async def _closed(self) -> None:
        assert self._load.concurrency is not None
        clients = [self._client(number) for number in range(self._load.concurrency)]
        await asyncio.gather(*clients)

    async def _client(self, number: int) -> None:
        # Spread over half of the warm-up, so that clients do not run in step.
        assert self._load.concurrency is not None
        await asyncio.sleep(self._load.warmup / 2 * number / self._load.concurrency)
        while self._take(clock()):
            stream = await self._one(clock())
            if stream.error is not None:
                await asyncio.sleep(_PAUSE)

    async def _open(self) -> None:
        """Send requests at random times. Latencies count from when a request should be sent, whatever delays it."""
        assert self._load.rate is not None
        tasks: set[asyncio.Task[Stream]] = set()
        due = self._started + self._chance.expovariate(self._load.rate)
        try:
            while due < self._until:
                await asyncio.sleep(max(0.0, due - clock()))
                while len(tasks) >= MOST_IN_FLIGHT:
                    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if not self._take(due):
                    break
                task = asyncio.ensure_future(self._one(due))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += self._chance.expovariate(self._load.rate)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            self._add_unsent(due, self._load.rate)
            await asyncio.gather(*tasks, return_exceptions=True)

    def _add_unsent(self, due: float, rate: float) -> None:
        """Count requests that were due and still waited when the load ended as unfinished."""
        now = clock()
        while due < now and self._take(due):
            stream = Stream(due)
            stream.sent = now
            self._figures.add(stream, self._until)
            due += self._chance.expovariate(rate)

    def _take(self, intended: float) -> bool:
        """Return whether a request may be sent that is intended for this time."""
        if intended >= self._until or not self._left or self._failures >= _MOST_FAILURES:
            return False
        if self._left > 0 and intended >= self._figures.begin:
            self._left -= 1
        return True

    async def _one(self, intended: float) -> Stream:
        prompt = next(self._prompts)
        requests = self._requests
        reader = requests.reader(prompt, intended)
        stream = reader.stream
        self._live.add(stream)
        await requests.client.send(requests.make(prompt), reader)
        self._live.discard(stream)
        self._last = max(self._last, stream.ended or 0.0)
        if stream.error is None:
            self._failures = -math.inf
        self._failures += 1
        self._figures.add(stream, self._until)
        return stream

    # -- progress ------------------------------------------------------------------------------------------------------

    async def _tick(self, show: Show) -> None:
        figures, until = self._figures, self._until
        progress = Progress(self._load, figures)
        begun: float | None = None
        ended = False
        seen, seen_at = 0, clock()
        while True:
            await asyncio.sleep(_TICK)
            now = clock()
            if begun is None and now >= figures.begin:
                begun, begun_at = time.process_time(), now
            if begun is not None and not ended and now > begun_at:
                figures.cpu_share = (time.process_time() - begun) / (now - begun_at)
                ended = now >= until
            progress.in_flight = len(self._live)
            arrived = figures.tokens + sum(stream.tokens for stream in self._live)
            progress.tokens_per_second = max(0, arrived - seen) / (now - seen_at)
            seen, seen_at = arrived, now
            progress.since = now - figures.begin
            progress.phase = "warm-up" if now < figures.begin else "measuring" if now < until else "last responses"
            with contextlib.suppress(BrokenPipeError):
                show(progress)
