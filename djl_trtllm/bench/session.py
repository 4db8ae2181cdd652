"""A whole benchmark: preparing, the loads one after another, and what they measured."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from djl_trtllm.bench.apis import Requests, tokens_per_word
from djl_trtllm.bench.client import Client, Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.load import BUSY, MOST_IN_FLIGHT, Load, Run, Show
from djl_trtllm.bench.prompts import TOKENS_PER_WORD, Prompt, like_sharegpt, of_file, sample_text, synthetic
from djl_trtllm.bench.streams import Counted
from djl_trtllm.bench.sweep import Sweep, find_knee
from djl_trtllm.descriptors import raise_limit

T = TypeVar("T")

_OTHER_FILES = 64
_LATE = 0.01
"""Seconds: the client's own part in the latencies that is worth a warning."""


@dataclass(frozen=True)
class Plan:
    """What to measure. Without `loads` a sweep finds the knee."""

    target: Target
    api: str = "chat"
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    ignore_end: bool = True
    dataset: str = "synthetic"
    prompt_tokens: int = 128
    output_tokens: int = 128
    seed: int = 0
    timeout: float = 600.0
    loads: tuple[Load, ...] = ()
    template: Load = field(default_factory=Load)
    """Of the loads of a sweep."""
    most_clients: int = 1024


@dataclass
class Result:
    """What was measured, in the order in which it is shown."""

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
        """What makes the figures less than they look."""
        return [f"{figures.label}: {text}" for figures in self.figures for text in _warnings(figures)]


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


async def run(plan: Plan, show: Show, say: Callable[[str], None], result: Result) -> None:
    """Fill `result`. The first Ctrl-C (SIGINT or SIGTERM) ends the running load and the benchmark.

    Raises BenchmarkError if the server answers no first request.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    raise_limit(max(_connections(plan, load) for load in plan.loads or (plan.template,)) + _OTHER_FILES)
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            # The second one ends the program.
            before = signal.getsignal(number)
            loop.add_signal_handler(number, _stop, stop, loop, number, before)
            stack.callback(_restore, loop, number, before)
        client = Client(plan.target, plan.timeout)
        try:
            await _run(plan, client, stop, show, say, result)
        finally:
            client.close()
            result.interrupted = stop.is_set()


def _connections(plan: Plan, load: Load) -> int:
    return MOST_IN_FLIGHT if load.rate is not None else load.concurrency or plan.most_clients


def _stop(stop: asyncio.Event, loop: asyncio.AbstractEventLoop, number: int, before: Any) -> None:
    stop.set()
    _restore(loop, number, before)


def _restore(loop: asyncio.AbstractEventLoop, number: int, before: Any) -> None:
    if loop.remove_signal_handler(number):
        signal.signal(number, before)


async def _run(
    plan: Plan, client: Client, stop: asyncio.Event, show: Show, say: Callable[[str], None], result: Result
) -> None:
    chance = random.Random(plan.seed)  # noqa: S311  # the same load in every run
    requests = Requests(client, plan.api, plan.model, plan.parameters, ignore_end=plan.ignore_end)
    await _until(stop, requests.prepare(_prompts(plan, chance, TOKENS_PER_WORD)))
    result.model = requests.model
    result.notes += requests.notes
    per_word = TOKENS_PER_WORD
    if plan.dataset in ("synthetic", "sharegpt") and not stop.is_set():
        measured = await _until(stop, tokens_per_word(client, sample_text()))
        per_word = measured or per_word
        if measured is None and not stop.is_set():
            result.notes.append(f"the server has no POST /tokenize: a word counts as {per_word} tokens")
    for note in result.notes:
        say(f"note: {note}")
    prompts = _prompts(plan, chance, per_word)

    async def measure(load: Load) -> Figures:
        return await Run(load, requests, prompts, stop, chance).measure(show)

    async def with_clients(clients: int) -> Figures:
        return await measure(replace(plan.template, concurrency=clients))

    if not plan.loads:
        result.sweep = Sweep()
        if not stop.is_set():
            await find_knee(with_clients, plan.most_clients, result.sweep)
    for load in plan.loads:
        if not stop.is_set():
            result.loads.append(await measure(load))


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """Wait for `work`, or for the stop: None."""
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
    if plan.dataset == "sharegpt":
        return like_sharegpt(chance, per_word)
    return of_file(Path(plan.dataset), plan.output_tokens, chance)
