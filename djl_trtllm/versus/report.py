"""Report a comparison: one table with a column for each engine, JSON, and one picture."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.report import Chart, Line, number, picture
from djl_trtllm.progress import format_bytes
from djl_trtllm.sizing.machines import PRICES, Instance, usd_per_million
from djl_trtllm.version import __version__
from djl_trtllm.versus.rounds import Measured, Round, Spread, Versus

Value = Callable[[Figures], float]
_BY_LOAD: dict[str, Value] = {
    "tok/s": lambda figures: figures.tokens_per_second,
    "TTFT p50 ms": lambda figures: 1000 * figures.ttft.percentile(0.5),
    "TTFT p99 ms": lambda figures: 1000 * figures.ttft.percentile(0.99),
    "ITL p50 ms": lambda figures: 1000 * figures.itl.percentile(0.5),
    "ITL p99 ms": lambda figures: 1000 * figures.itl.percentile(0.99),
}
_SHOWN = 60


def by_load(measured: Measured, load: int, value: Value) -> Spread:
    return measured.spread(lambda each: value(each.figures[load]))


def table(found: Versus, instance: Instance | None) -> list[list[str]]:
    """Rows of cells: a figure, and its median (lowest-highest) on each engine. The first row names the engines."""
    engines = found.engines
    rows = [["", *(measured.engine.name for measured in engines)]]
    for load, each in enumerate(found.plan.loads):
        rows += [
            [f"{name}, {each.label}", *(_spread(by_load(measured, load, value)) for measured in engines)]
            for name, value in _BY_LOAD.items()
        ]
    rows.append(["most tok/s", *(_spread(measured.throughput) for measured in engines)])
    rows.append(["knee, clients", *(_spread(measured.spread(lambda each: each.knee)) for measured in engines)])
    rows.append(["start s", *(_spread(measured.spread(lambda each: each.start_seconds)) for measured in engines)])
    rows.append(["memory", *(_bytes(measured.spread(lambda each: each.memory.host)) for measured in engines)])
    if all(each.memory.gpus is not None for measured in engines for each in measured.rounds):
        gpus = [measured.spread(lambda each: each.memory.gpus or 0) for measured in engines]
        rows.append(["GPU memory", *map(_bytes, gpus)])
    rows.append(["tokens that agree", "the reference", *(_agreement(found, measured) for measured in engines[1:])])
    if instance is not None:
        prices = [measured.spread(partial(_price, instance)) for measured in engines]
        rows.append([f"$ per million tokens, {instance.name}", *map(_spread, prices)])
    rows.append(["failed requests", *(f"{measured.failed:,}" for measured in engines)])
    return rows


def _price(instance: Instance, each: Round) -> float:
    assert instance.hourly_price is not None  # the command line has made sure
    return usd_per_million(instance.hourly_price, each.best.tokens_per_second)


def _spread(spread: Spread) -> str:
    middle, low, high = map(number, spread)
    return middle if low == high else f"{middle} ({low}-{high})"


def _bytes(spread: Spread) -> str:
    middle, low, high = (format_bytes(int(each)) for each in spread)
    return middle if low == high else f"{middle} ({low}-{high})"


def _agreement(found: Versus, measured: Measured) -> str:
    comparison = found.agreement(measured)
    if comparison is None:
        return "not available"
    verdict = "differs" if any(comparison.reasons()) else "agrees"
    return f"{100 * comparison.agreement:.2f} % ({verdict})"


def configuration(found: Versus) -> list[list[str]]:
    """Rows of the options that differ, with the value on each engine; the first row names the engines."""
    rows = [["", *(measured.engine.name for measured in found.engines)]]
    return rows + [[key, *(_shortened(cell) for cell in cells)] for key, cells in found.differing.items()]


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def conclusion(found: Versus, instance: Instance | None) -> Iterator[str]:
    """Yield sentences: which engine is ahead, which answers differ, what has no figure, and where the price is from."""
    first, second = found.fastest()
    rounds = len(first.rounds)
    if found.ahead is not None:
        factor = first.throughput.median / second.throughput.median if second.throughput.median else math.inf
        yield (
            f"{first.engine.name} is ahead: its slowest round has more tokens per second than the fastest of "
            f"{second.engine.name} ({factor:.2f} times by the medians of {rounds} rounds)."
        )
    elif rounds == 1:
        yield f"{first.engine.name} has the most tokens per second in one round; more --rounds show if it is ahead."
    else:
        yield f"No engine is ahead: rounds of {first.engine.name} and others overlap."
    for measured in found.engines:
        comparison = found.agreement(measured)
        if measured.no_answers:
            yield f"{measured.engine.name} has no answers to compare: {measured.no_answers}"
        elif comparison is not None and (reasons := list(comparison.reasons())):
            yield f"{measured.engine.name} answers otherwise than {found.engines[0].engine.name}: {'; '.join(reasons)}."
    if instance is not None:
        yield f"The price is that of {instance.name} ({PRICES}); the throughput is that of this machine."


def as_json(found: Versus, instance: Instance | None) -> dict[str, Any]:
    plan = found.plan
    ahead = found.ahead if found.complete else None
    return {
        "version": __version__,
        "model": found.model,
        "api": plan.api,
        "dataset": plan.dataset,
        "prompt_tokens": plan.prompt_tokens if plan.dataset == "synthetic" else None,
        "output_tokens": plan.output_tokens,
        "limits": found.limits,
        "interrupted": found.interrupted,
        "ahead": ahead and ahead.engine.name,
        "instance": instance and {"name": instance.name, "usd_per_hour": instance.hourly_price, "prices": str(PRICES)},
        "engines": [_engine(found, measured, instance) for measured in found.engines],
        "configuration": {
            key: dict(zip((measured.engine.name for measured in found.engines), cells, strict=True))
            for key, cells in found.differing.items()
        },
        "warnings": found.warnings,
    }


def _engine(found: Versus, measured: Measured, instance: Instance | None) -> dict[str, Any]:
    comparison = found.agreement(measured) if measured is not found.engines[0] else None
    return {
        "engine": measured.engine.name,
        "python": measured.engine.python,
        "rounds": [
            {
                "start_seconds": each.start_seconds,
                "memory_bytes": each.memory.host,
                "gpu_memory_bytes": each.memory.gpus,
                "knee": each.knee,
                "output_tokens_per_second": each.best.tokens_per_second,
                "usd_per_million_tokens": _price(instance, each) if instance and each.best.tokens else None,
                "loads": [figures.as_json() for figures in each.figures],
            }
            for each in measured.rounds
        ],
        "answers": comparison and comparison.as_json(),
        "no_answers": measured.no_answers or None,
    }


def picture_of(found: Versus) -> str:
    """Return the picture as SVG: medians of throughput and latencies by clients, and answers that still agree."""
    charts = [
        Chart(
            name,
            "clients",
            unit,
            [_line(found, measured, _BY_LOAD[figure], factor) for measured in found.engines],
            log="x",
        )
        for name, unit, figure, factor in (
            ("Throughput", "tokens per second", "tok/s", 1.0),
            ("Time to first token, median", "seconds", "TTFT p50 ms", 0.001),
            ("Inter-token latency, median", "seconds", "ITL p50 ms", 0.001),
        )
    ]
    compared = {measured.engine.name: found.agreement(measured) for measured in found.engines[1:]}
    lines = [Line(name, each.agreeing(), steps=True) for name, each in compared.items() if each is not None]
    if lines:
        title = f"Prompts whose answers agree with those of {found.engines[0].engine.name}"
        charts.append(Chart(title, "tokens", "share", lines))
    return picture(charts)


def _line(found: Versus, measured: Measured, value: Value, factor: float) -> Line:
    loads = [float(load.concurrency or 0) for load in found.plan.loads]
    spreads = [by_load(measured, load, value) for load in range(len(loads))]
    labels = [f"{clients:g}" for clients in loads]
    return Line(measured.engine.name, [(x, factor * y.median) for x, y in zip(loads, spreads, strict=True)], labels)
