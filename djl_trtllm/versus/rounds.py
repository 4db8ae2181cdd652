"""The rounds of a comparison: in each, every engine is started, measured under the same loads, and ended.

The order turns round by round (A B, B A, A B), so that a machine that slows down affects all alike. A round is kept as
the JSON of the command has it; the table, the conclusion and the picture are made of that.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from djl_trtllm.bench.apis import read_prompts
from djl_trtllm.bench.client import Target
from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.report import Chart, Line, picture, plan_as_json
from djl_trtllm.bench.session import Plan, Result, Sweep, run_here as run_load
from djl_trtllm.config.sources import shortened
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.listing import number, seconds
from djl_trtllm.progress import format_bytes
from djl_trtllm.quality.figures import Comparison, Continuation
from djl_trtllm.quality.report import DEFAULT_PROMPTS
from djl_trtllm.quality.sides import Asked, Served
from djl_trtllm.sizing.machines import PRICES, Instance, usd_per_million
from djl_trtllm.versus.engines import Engine, Server, common_limits, differences, resolve, serving

_ANSWER_TOKENS = 64
_LONGEST_VALUE = 60

Round = dict[str, Any]
"""One start of an engine: its figures, and those of each load (`Figures.as_json`) in `loads`."""
_OF_LOAD = {
    "tok/s": "output_tokens_per_second",
    "TTFT p50": "ttft_seconds.p50",
    "TTFT p99": "ttft_seconds.p99",
    "ITL p50": "itl_seconds.p50",
    "ITL p99": "itl_seconds.p99",
}
"""Rows of the table for each load, with the paths of their figures in its JSON."""
_OF_ROUND = {
    "most tok/s": "output_tokens_per_second",
    "knee, clients": "knee",
    "start": "start_seconds",
    "memory": "memory_bytes",
    "GPU memory": "gpu_memory_bytes",
    "$ per million tokens": "usd_per_million_tokens",
}
"""Rows of the table for each round, with the names of their figures."""
_DRAWN = {"tok/s": "tokens per second", "TTFT p50": "seconds", "ITL p50": "seconds"}
"""The rows that the picture has, with their units."""


def round_of(
    seconds: float, loads: Sequence[Figures], memory: Mapping[str, int | None], hourly_price: float | None
) -> Round:
    """The figures of one start that took `seconds`; the price is in USD."""
    most = max(figures.tokens_per_second for figures in loads)
    return {
        "output_tokens_per_second": most,
        # Of the clients that were measured.
        "knee": Sweep({figures.concurrency or 0: figures for figures in loads}).bracket()[1],
        "start_seconds": seconds,
        **memory,
        "usd_per_million_tokens": usd_per_million(hourly_price, most),
        "loads": [figures.as_json() for figures in loads],
    }


class Spread(NamedTuple):
    """The median of some rounds with the lowest and the highest; all nan where no round has a value."""

    median: float
    lowest: float
    highest: float

    def written(self, name: str) -> str:
        """The values of a figure of this name, by its unit: `147 ms (42.7 ms-251 ms)`."""
        units: dict[str, Callable[[float], str]] = {"seconds": seconds, "bytes": lambda size: format_bytes(int(size))}
        unit = units.get(name.partition(".")[0].rpartition("_")[2], number)
        if math.isnan(self.median):
            return "-"
        middle, low, high = map(unit, self)
        return middle if low == high else f"{middle} ({low}-{high})"


@dataclass
class Measured:
    """The measurements of one engine. `answers` are its greedy answers; `no_answers` says why there are none."""

    engine: Engine
    rounds: list[Round] = field(default_factory=list)
    answers: list[Continuation] = field(default_factory=list)
    no_answers: str = ""

    def spread(self, path: str, load: int | None = None) -> Spread:
        """The spread of a figure over the rounds, or over those of one load, by its path: `ttft_seconds.p50`."""
        name, _, percentile = path.partition(".")
        found = [(each if load is None else each["loads"][load])[name] for each in self.rounds]
        values = [value.get(percentile) for value in found] if percentile else found
        known = [value for value in values if value is not None and math.isfinite(value)] or [math.nan]
        return Spread(median(known), min(known), max(known))

    @property
    def throughput(self) -> Spread:
        """The highest throughput of each round, in tokens per second."""
        return self.spread("output_tokens_per_second")

    @property
    def middle(self) -> Round:
        """The round of the median throughput, or the faster one of the two next to it."""
        return sorted(self.rounds, key=lambda each: float(each["output_tokens_per_second"]))[len(self.rounds) // 2]

    @property
    def failed(self) -> int:
        counts = [load["requests"] for each in self.rounds for load in each["loads"]]
        return sum(count["failed"] + count["unfinished"] for count in counts)


@dataclass
class Versus:
    """The engines side by side, and what is said of them. `differing` are options that differ between them, by key.

    `instance` is the machine whose price per hour counts. `limits` has the limits that differed, and what was set for
    all. `failure` is why the last round is not whole.
    """

    model: str
    plan: Plan
    engines: list[Measured]
    instance: Instance | None = None
    differing: dict[str, list[str]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    interrupted: bool = False
    failure: BenchmarkError | None = None

    @property
    def complete(self) -> bool:
        """Whether every engine has a whole round."""
        return all(measured.rounds for measured in self.engines)

    @property
    def names(self) -> list[str]:
        return [measured.engine.name for measured in self.engines]

    def agreement(self, measured: Measured) -> Comparison | None:
        """The answers of an engine beside those of the first one; None where either has none."""
        first = self.engines[0]
        compared = first.answers and measured.answers and measured is not first
        return Comparison(first.answers, measured.answers) if compared else None

    @property
    def ranked(self) -> list[Measured]:
        """The engines by their median throughput, the fastest first."""
        return sorted(self.engines, key=lambda each: -each.throughput.median)

    @property
    def ahead(self) -> Measured | None:
        """The fastest engine if even its slowest round is faster than all of the others; one round shows nothing."""
        first, *others = self.ranked
        apart = all(first.throughput.lowest > other.throughput.highest for other in others)
        return first if apart and len(first.rounds) > 1 else None

    def table(self) -> list[list[str]]:
        """Rows of cells: a figure, and its median (lowest-highest) on each engine. The first row names the engines.

        A figure of a round that no engine has is left out.
        """
        rows = [["", *self.names]]
        for place, load in enumerate(self.plan.loads):
            for title, path in _OF_LOAD.items():
                cells = [each.spread(path, place).written(path) for each in self.engines]
                rows.append([f"{title}, {load.label}", *cells])
        for title, name in _OF_ROUND.items():
            cells = [each.spread(name).written(name) for each in self.engines]
            rows += [[title, *cells]] if {*cells} != {"-"} else []
        rows.append(["tokens that agree", "the reference", *map(self._agreement, self.engines[1:])])
        rows.append(["failed requests", *(f"{each.failed:,}" for each in self.engines)])
        return rows

    def _agreement(self, measured: Measured) -> str:
        comparison = self.agreement(measured)
        if comparison is None:
            return "not available"
        return f"{100 * comparison.agreement:.2f} % ({'differs' if any(comparison.reasons()) else 'agrees'})"

    def configuration(self) -> list[list[str]]:
        """Rows of the options that differ, with the value on each engine; the first row names the engines."""
        rows = [[key, *(shortened(cell, _LONGEST_VALUE) for cell in cells)] for key, cells in self.differing.items()]
        return [["Options that differ", *self.names], *rows] if rows else []

    def conclusion(self) -> Iterator[str]:
        """Yield sentences: which engine is ahead, which answers differ, what is not known, where the price is from."""
        first, second, *_ = self.ranked
        rounds, (fast, slow) = len(first.rounds), (each.engine.name for each in (first, second))
        if self.ahead is not None:
            factor = first.throughput.median / second.throughput.median if second.throughput.median else math.inf
            yield (
                f"{fast} is ahead: its slowest round has more tokens per second than the fastest of {slow} "
                f"({factor:.2f} times by the medians of {rounds} rounds)."
            )
        elif rounds == 1:
            yield f"{fast} has the most tokens per second in one round; more --rounds show if it is ahead."
        else:
            yield f"No engine is ahead: rounds of {fast} and others overlap."
        for measured in self.engines:
            comparison, name = self.agreement(measured), measured.engine.name
            if measured.no_answers:
                yield f"{name} has no answers to compare: {measured.no_answers}"
            elif comparison is not None and (reasons := list(comparison.reasons())):
                yield f"{name} answers otherwise than {self.names[0]}: {'; '.join(reasons)}."
        if self.instance is not None:
            yield f"The price is that of {self.instance.name} ({PRICES}); the throughput is that of this machine."

    def as_json(self) -> dict[str, Any]:
        machine = self.instance
        return {
            **plan_as_json(self.plan),
            "model": self.model,
            "limits": self.limits,
            "interrupted": self.interrupted,
            "ahead": self.ahead.engine.name if self.complete and self.ahead else None,
            "instance": machine and {"name": machine.name, "usd_per_hour": machine.hourly_price, "prices": str(PRICES)},
            "engines": [
                {
                    "engine": each.engine.name,
                    "python": each.engine.python,
                    "rounds": each.rounds,
                    "answers": (compared := self.agreement(each)) and compared.as_json(),
                    "no_answers": each.no_answers or None,
                }
                for each in self.engines
            ],
            "configuration": {key: dict(zip(self.names, cells, strict=True)) for key, cells in self.differing.items()},
            "warnings": self.warnings,
        }

    def picture(self) -> str:
        """Return the picture as SVG: medians of throughput and latencies by clients, and answers that still agree."""
        clients = [float(load.concurrency or 0) for load in self.plan.loads]
        labels = [f"{each:g}" for each in clients]
        charts = []
        for title, unit in _DRAWN.items():
            path = _OF_LOAD[title]
            medians = [[each.spread(path, place).median for place in range(len(clients))] for each in self.engines]
            lines = [Line(n, [*zip(clients, m, strict=True)], labels) for n, m in zip(self.names, medians, strict=True)]
            charts.append(Chart(title, "clients", unit, lines, log="x"))
        compared = {each.engine.name: self.agreement(each) for each in self.engines}
        lines = [Line(name, each.agreeing(), steps=True) for name, each in compared.items() if each is not None]
        title = f"Prompts whose answers agree with those of {self.names[0]}"
        return picture([*charts, *([Chart(title, "tokens", "share", lines)] if lines else [])])


def compare(found: Versus, rounds: int, say: Callable[[str], None]) -> None:
    """Measure the model on each engine, in turns. `plan.target` is replaced by each server's own.

    Ctrl-C ends the running server and leaves the rounds that are whole, and so does an engine that cannot serve the
    model, or answers no request. Raises BenchmarkError for such an engine before every engine has a round.
    """
    with TemporaryDirectory(prefix="djl-trtllm-versus-") as scratch:
        try:
            _resolve(found, say)
            for number in range(rounds):
                for measured in found.engines if number % 2 == 0 else found.engines[::-1]:
                    name = measured.engine.name
                    say(f"round {number + 1} of {rounds}: {name} starts")
                    with serving(measured.engine, found.model, found.limits, Path(scratch, f"{name}.log")) as server:
                        say(f"{name} is ready after {server.seconds:.1f} s")
                        _measure(found, measured, server, number, say)
        except KeyboardInterrupt:
            found.interrupted = True
        except BenchmarkError as error:
            if not found.complete:
                raise
            found.failure = error
    found.warnings = list(dict.fromkeys(found.warnings))


def _measure(found: Versus, measured: Measured, server: Server, number: int, say: Callable[[str], None]) -> None:
    """Add a round, the first with answers. Raises KeyboardInterrupt, and BenchmarkError where no request succeeds."""
    name, target = measured.engine.name, Target.parse(server.url, {})
    result = Result(replace(found.plan, target=target, seed=number))
    # Nothing is shown of a load that runs: a line for each start and end is enough.
    run_load(lambda progress: None, say, result)
    found.warnings += [f"{name}: {text}" for text in result.warnings]
    if server.restarts():
        found.warnings.append(f"{name}: the engine process was lost and replaced in a round")
    if result.interrupted:
        raise KeyboardInterrupt
    if not any(figures.succeeded for figures in result.figures):
        errors = [f"{kind} {each.details.get(kind, '')}".strip() for each in result.figures for kind in each.errors]
        raise BenchmarkError(f"{name}: no request succeeded: {(errors or ['none ended in time'])[0]}")
    hourly_price = None if found.instance is None else found.instance.hourly_price
    measured.rounds.append(round_of(server.seconds, result.figures, server.memory(), hourly_price))
    if number == 0:
        say(f"{name} answers the prompts of `quality`")
        prompts = read_prompts(DEFAULT_PROMPTS, _ANSWER_TOKENS, "the prompts of quality")
        try:
            measured.answers = Served(name, target, None, found.plan.timeout).answer(Asked(prompts, _ANSWER_TOKENS))
        except BenchmarkError as error:
            measured.no_answers = str(error)


def _resolve(found: Versus, say: Callable[[str], None]) -> None:
    """Find the limits that differ, which all engines get alike, and then the other options that differ."""
    options = [resolve(measured.engine, found.model, {}) for measured in found.engines]
    found.limits = common_limits(options)
    if found.limits:
        set_for_all = ", ".join(f"option.{name}={value}" for name, value in found.limits.items())
        say(f"limits differ between the engines; all get the smallest: {set_for_all}")
        options = [resolve(measured.engine, found.model, found.limits) for measured in found.engines]
    found.differing = differences(options)
