"""The rounds of a comparison: in each, every engine is started, measured under the same loads, and ended.

The order turns round by round (A B, B A, A B), so that a machine that slows down affects all alike.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from djl_trtllm.bench.apis import read_prompts
from djl_trtllm.bench.client import Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.session import Plan, Result, Sweep
from djl_trtllm.bench.session import run_here as run_load
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.quality.figures import Comparison, Continuation
from djl_trtllm.quality.report import DEFAULT_PROMPTS
from djl_trtllm.quality.sides import Asked, Served
from djl_trtllm.versus.engines import Engine, Memory, Server, common_limits, differences, prepare, resolve, serving

_ANSWER_TOKENS = 64


class Spread(NamedTuple):
    """The median of some rounds with the lowest and the highest; all nan where no round has a value."""

    median: float
    lowest: float
    highest: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread":
        known = [value for value in values if value is not None and math.isfinite(value)] or [math.nan]
        return cls(median(known), min(known), max(known))


class Round(NamedTuple):
    """One start of an engine: its seconds, the figures of each load, and the memory after them."""

    start_seconds: float
    figures: list[Figures]
    memory: Memory

    @property
    def best(self) -> Figures:
        return max(self.figures, key=lambda figures: figures.tokens_per_second)

    @property
    def knee(self) -> int:
        """The smallest number of clients with nearly the highest throughput of this round, of those measured."""
        points = {figures.concurrency or 0: figures for figures in self.figures}
        return Sweep(points).bracket()[1]


@dataclass
class Measured:
    """What was found of one engine. `answers` are its greedy answers; `no_answers` says why there are none."""

    engine: Engine
    rounds: list[Round] = field(default_factory=list)
    answers: list[Continuation] = field(default_factory=list)
    no_answers: str = ""

    def spread(self, value: Callable[[Round], float | None]) -> Spread:
        return Spread.of(value(each) for each in self.rounds)

    @property
    def throughput(self) -> Spread:
        """The highest throughput of each round, in tokens per second."""
        return self.spread(lambda each: each.best.tokens_per_second)

    @property
    def middle(self) -> Round:
        """The round of the median throughput, or the faster one of the two next to it."""
        return sorted(self.rounds, key=lambda each: each.best.tokens_per_second)[len(self.rounds) // 2]

    @property
    def failed(self) -> int:
        return sum(figures.failed + figures.unfinished for each in self.rounds for figures in each.figures)


@dataclass
class Versus:
    """The engines side by side. `differing` are the options that differ between them, by key."""

    model: str
    plan: Plan
    engines: list[Measured]
    differing: dict[str, list[str]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    """Limits that differed, and what was set for all."""
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False
    failure: BenchmarkError | None = None
    """Why the last round is not whole."""

    @property
    def complete(self) -> bool:
        """Whether every engine has a whole round."""
        return all(measured.rounds for measured in self.engines)

    def agreement(self, measured: Measured) -> Comparison | None:
        """The answers of an engine beside those of the first one; None where either has none."""
        first = self.engines[0]
        return Comparison(first.answers, measured.answers) if first.answers and measured.answers else None

    def ranked(self) -> list[Measured]:
        """The engines by their median throughput, the highest first."""
        return sorted(self.engines, key=lambda each: -each.throughput.median)

    @property
    def ahead(self) -> Measured | None:
        """The fastest engine if even its slowest round is faster than all of the others; one round shows nothing."""
        first, *others = self.ranked()
        apart = all(first.throughput.lowest > other.throughput.highest for other in others)
        return first if apart and len(first.rounds) > 1 else None


def compare(model: str, engines: Sequence[Engine], plan: Plan, rounds: int, say: Callable[[str], None]) -> Versus:
    """Measure a model on each engine, in turns. `plan.target` is replaced by each server's own.

    Ctrl-C ends the running server and leaves the rounds that are whole, and so does an engine that cannot serve the
    model, or answers no request. Raises BenchmarkError for such an engine before every engine has a round.
    """
    found = Versus(model, plan, [Measured(engine) for engine in engines])
    with TemporaryDirectory(prefix="djl-trtllm-versus-") as scratch:
        try:
            directories = _resolve(found, Path(scratch), say)
            for number in range(rounds):
                for measured in found.engines if number % 2 == 0 else found.engines[::-1]:
                    name = measured.engine.name
                    say(f"round {number + 1} of {rounds}: {name} starts")
                    log = Path(scratch, f"{name}.log")
                    with serving(measured.engine, directories[name], log) as server:
                        say(f"{name} is ready after {server.seconds:.1f} s")
                        result = Result(replace(plan, target=Target.parse(server.url, {}), seed=number))
                        # Nothing is shown of a load that runs: a line for each start and end is enough.
                        run_load(lambda progress: None, say, result)
                        found.warnings += [f"{name}: {text}" for text in result.warnings]
                        if server.restarts():
                            found.warnings.append(f"{name}: the engine process was lost and replaced in a round")
                        if result.interrupted:
                            raise KeyboardInterrupt
                        if not any(figures.succeeded for figures in result.figures):
                            raise BenchmarkError(f"{name}: no request succeeded: {_errors(result)}")
                        measured.rounds.append(Round(server.seconds, result.figures, server.memory()))
                        if number == 0:
                            say(f"{name} answers the prompts of `quality`")
                            _ask(measured, server, plan.timeout)
        except KeyboardInterrupt:
            found.interrupted = True
        except BenchmarkError as error:
            if not found.complete:
                raise
            found.failure = error
    found.warnings = list(dict.fromkeys(found.warnings))
    return found


def _resolve(found: Versus, scratch: Path, say: Callable[[str], None]) -> dict[str, Path]:
    """Make a directory for each engine, with the same limits, by the engine's name."""
    engines = [measured.engine for measured in found.engines]

    def resolved() -> list[dict[str, Any]]:
        directories.update({engine.name: prepare(found.model, engine, found.limits, scratch) for engine in engines})
        return [resolve(engine, directories[engine.name]) for engine in engines]

    directories: dict[str, Path] = {}
    options = resolved()
    found.limits = common_limits(options)
    if found.limits:
        set_for_all = ", ".join(f"option.{name}={value}" for name, value in found.limits.items())
        say(f"limits differ between the engines; all get the smallest: {set_for_all}")
        options = resolved()
    found.differing = differences(options)
    return directories


def _errors(result: Result) -> str:
    kinds = [f"{kind} {figures.details.get(kind, '')}".strip() for figures in result.figures for kind in figures.errors]
    return kinds[0] if kinds else "none ended in time"


def _ask(measured: Measured, server: Server, timeout: float) -> None:
    side = Served(measured.engine.name, Target.parse(server.url, {}), None, timeout)
    prompts = read_prompts(DEFAULT_PROMPTS, _ANSWER_TOKENS, "the prompts of quality")
    try:
        measured.answers = side.answer(Asked(prompts, _ANSWER_TOKENS))
    except BenchmarkError as error:
        measured.no_answers = str(error)
