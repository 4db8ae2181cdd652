"""A whole benchmark: preparing, the loads one after another, and what they measured."""

import asyncio
import contextlib
import math
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from djl_trtllm.bench.apis import (
    TOKENS_PER_WORD,
    Prompt,
    Requests,
    of_file,
    sample_text,
    synthetic,
    tokens_per_word,
)
from djl_trtllm.bench.client import Client, Counted, Stream, Target, clock
from djl_trtllm.bench.figures import Figures
from djl_trtllm.processes import raise_limit

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
    duration: float | None = None
    requests: int | None = None
    warmup: float = 0.0
    drain: float = 60.0

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
        self._figures = figures = Figures(load.label, self._started + load.warmup)
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
        """Count as unfinished the requests that were due and still waited when the load ended."""
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


# -- the sweep ---------------------------------------------------------------------------------------------------------

GAIN = 1.05
"""The server is saturated if twice as many clients bring less than this factor of throughput."""
SHARE = 0.95
"""Share of the saturated server's throughput that makes a number of clients the knee."""
PRECISION = 1.1
"""The knee is known if the numbers of clients around it differ by this factor at most."""

Measure = Callable[[int], Awaitable[Figures]]


@dataclass
class Sweep:
    """The figures of a sweep, by number of clients."""

    points: dict[int, Figures] = field(default_factory=dict)
    knee: int | None = None
    """The knee's number of clients; None if throughput still grew at the largest, or after an interrupt."""

    @property
    def capacity(self) -> float:
        """The throughput of the saturated server in tokens per second: the mean of those near the highest."""
        speeds = [figures.tokens_per_second for figures in self.points.values()]
        near = [speed for speed in speeds if speed >= SHARE * max(speeds)]
        return sum(near) / len(near) if near else 0.0

    def bracket(self) -> tuple[int, int]:
        """The numbers of clients next to the knee: below it, and the first at or above it."""
        enough = min(n for n, figures in self.points.items() if figures.tokens_per_second >= SHARE * self.capacity)
        return max((n for n in self.points if n < enough), default=0), enough


async def find_knee(measure: Measure, most: int, sweep: Sweep) -> None:
    """Measure with 1, 2, 4, ... clients until that brings no more, then between the two numbers around the knee.

    `sweep` has what was measured at any time.
    """

    async def gain(clients: int) -> float | None:
        """The factor that this number of clients brings to the throughput; None if the load did not run to its end."""
        before = sweep.capacity
        figures = await measure(clients)
        if figures.complete or figures.sent:
            sweep.points[clients] = figures
        factor = figures.tokens_per_second / before if before else math.inf
        return factor if figures.complete else None

    clients = 1
    while (gained := await gain(clients)) is not None and gained >= GAIN:
        if clients >= most:
            return
        clients = min(most, 2 * clients)
    while gained is not None:
        low, high = sweep.bracket()
        if high - low <= 1 or high <= PRECISION * low:
            sweep.knee = high
            return
        # Numbers that are two or more apart have their geometric mean between them, also when it is rounded.
        gained = await gain(round(math.sqrt(low * high)))


T = TypeVar("T")

_OTHER_FILES = 64
_LATE = 0.01
"""Seconds of delay in the client itself that are worth a warning."""


@dataclass(frozen=True)
class Plan:
    """The loads to measure. Without `loads` a sweep finds the knee."""

    target: Target
    prompt_tokens: int
    output_tokens: int
    api: str = "chat"
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    ignore_end: bool = True
    dataset: str = "synthetic"
    seed: int = 0
    timeout: float = 600.0
    loads: tuple[Load, ...] = ()
    template: Load = field(default_factory=Load)
    """The settings that the loads of a sweep have in common."""
    most_clients: int = 1024


@dataclass
class Result:
    """The figures, in the order in which they are shown."""

    plan: Plan
    model: str = ""
    notes: list[str] = field(default_factory=list)
    loads: list[Figures] = field(default_factory=list)
    sweep: Sweep | None = None
    interrupted: bool = False

    @property
    def figures(self) -> list[Figures]:
        if self.sweep is None:
            return self.loads
        return [figures for _, figures in sorted(self.sweep.points.items())]

    @property
    def warnings(self) -> list[str]:
        """The server's own warnings, such as that of a parameter that it ignores, and those about doubtful figures."""
        by_server = dict.fromkeys(text for figures in self.figures for text in figures.server_warnings)
        doubtful = [f"{figures.label}: {text}" for figures in self.figures for text in _warnings(figures)]
        return [*(f"the server warns: {text}" for text in by_server), *doubtful]


def _warnings(figures: Figures) -> Iterator[str]:
    if figures.cpu_share >= BUSY:
        yield (
            f"the client used {100 * figures.cpu_share:.0f} % of a core, so it may be what was measured: use more "
            "machines, longer outputs or fewer clients"
        )
    elif figures.rate is not None and figures.lag.percentile(0.99) > _LATE:
        late = f"{1000 * figures.lag.percentile(0.99):.0f} ms"
        yield f"requests were sent up to {late} late (p99), which is part of all times"
    if figures.unfinished and figures.complete:
        yield (
            f"{figures.unfinished:,} requests had no end when --drain was over: their times, longer than those that "
            "are shown, are missing"
        )
    if figures.shortened:
        yield f"{figures.shortened} of {figures.succeeded} outputs are shorter than requested"
    if figures.seconds < 2 * figures.e2e.percentile(0.5):
        yield "requests take longer than half of the measured time: use a longer --duration"
    if figures.counted[Counted.EVENTS]:
        yield "the server reports no number of tokens: events are counted, which may hold several"


def run_here(show: Show, say: Callable[[str], None], result: Result) -> None:
    """Fill `result` on an event loop of its own; see `run`."""
    with contextlib.closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(run(result.plan, show, say, result))


async def run(plan: Plan, show: Show, say: Callable[[str], None], result: Result) -> None:
    """Fill `result`. The first Ctrl-C (SIGINT or SIGTERM) ends the running load and the benchmark.

    Raises BenchmarkError if the server answers no first request.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    raise_limit(max(_connections(plan, load) for load in plan.loads or (plan.template,)) + _OTHER_FILES)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            if loop.remove_signal_handler(number):
                signal.signal(number, handler)

    def end() -> None:
        stop.set()
        restore()  # the second one ends the program

    for number in before:
        loop.add_signal_handler(number, end)
    client = Client(plan.target, plan.timeout)
    try:
        await _run(plan, client, stop, show, say, result)
    finally:
        restore()
        client.close()
        result.interrupted = stop.is_set()


def _connections(plan: Plan, load: Load) -> int:
    return MOST_IN_FLIGHT if load.rate is not None else load.concurrency or plan.most_clients


async def _run(
    plan: Plan, client: Client, stop: asyncio.Event, show: Show, say: Callable[[str], None], result: Result
) -> None:
    chance = random.Random(plan.seed)  # noqa: S311  # the same load in every run
    requests = Requests(client, plan.api, plan.model, plan.parameters, ignore_end=plan.ignore_end)
    prompts = _prompts(plan, chance, TOKENS_PER_WORD)
    await _until(stop, requests.prepare(prompts))
    result.model = requests.model
    result.notes += requests.notes
    per_word = TOKENS_PER_WORD
    if not stop.is_set() and (plan.dataset == "synthetic" or next(prompts).tokens):
        measured = await _until(stop, tokens_per_word(client, sample_text()))
        per_word = measured or per_word
        if measured is None and not stop.is_set():
            result.notes.append(f"the server has no POST /tokenize: a word counts as {per_word} tokens")
    for note in result.notes:
        say(f"note: {note}")
    prompts = _prompts(plan, chance, per_word)

    async def measure(load: Load) -> Figures:
        return await Run(load, requests, prompts, stop, chance).measure(show)

    if not plan.loads:
        result.sweep = Sweep()
        if not stop.is_set():
            template = plan.template
            await find_knee(lambda n: measure(replace(template, concurrency=n)), plan.most_clients, result.sweep)
    for load in plan.loads:
        if not stop.is_set():
            result.loads.append(await measure(load))


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Wait for `work` and return its result, or None if the benchmark is stopped first."""
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return None


def _prompts(plan: Plan, chance: random.Random, per_word: float) -> Iterator[Prompt]:
    if plan.dataset == "synthetic":
        return synthetic(chance, plan.prompt_tokens, plan.output_tokens, per_word)
    return of_file(Path(plan.dataset), plan.output_tokens, chance, per_word)
