"""Report a comparison: one table with a column for each engine, JSON, and one picture."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from djl_trtllm.bench.figures import Figures
from djl_trtllm.bench.report import Chart, Line, picture
from djl_trtllm.config.sources import shortened
from djl_trtllm.listing import number
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


def _by_round(instance: Instance | None) -> dict[str, tuple[str, Callable[[Round], float | None]]]:
    """The figures of a round by their names in JSON, with their titles; those in bytes end so."""
    name, price = ("", None) if instance is None else (instance.name, instance.hourly_price)
    return {
        "output_tokens_per_second": ("most tok/s", lambda each: each.best.tokens_per_second),
        "knee": ("knee, clients", lambda each: each.knee),
        "start_seconds": ("start s", lambda each: each.start_seconds),
        "memory_bytes": ("memory", lambda each: each.memory.host),
        "gpu_memory_bytes": ("GPU memory", lambda each: each.memory.gpus),
        "usd_per_million_tokens": (
            f"$ per million tokens, {name}",
            lambda each: usd_per_million(price, each.best.tokens_per_second),
        ),
    }


def table(found: Versus, instance: Instance | None) -> list[list[str]]:
    """Rows of cells: a figure, and its median (lowest-highest) on each engine. The first row names the engines.

    A figure of a round that no engine has is left out.
    """
    engines = found.engines
    rows = [["", *(measured.engine.name for measured in engines)]]
    for load, each in enumerate(found.plan.loads):
        for name, value in _BY_LOAD.items():
            rows.append([f"{name}, {each.label}", *(_cell(_of_load(measured, load, value)) for measured in engines)])
    for key, (title, figure) in _by_round(instance).items():
        write = _bytes if key.endswith("bytes") else number
        cells = [_cell(measured.spread(figure), write) for measured in engines]
        rows += [[title, *cells]] if {*cells} != {"-"} else []
    rows.append(["tokens that agree", "the reference", *(_agreement(found, measured) for measured in engines[1:])])
    rows.append(["failed requests", *(f"{measured.failed:,}" for measured in engines)])
    return rows


def _of_load(measured: Measured, load: int, value: Value) -> Spread:
    return measured.spread(lambda each: value(each.figures[load]))


def _cell(spread: Spread, write: Callable[[float], str] = number) -> str:
    middle, low, high = map(write, spread)
    return middle if low == high else f"{middle} ({low}-{high})"


def _bytes(value: float) -> str:
    return "-" if math.isnan(value) else format_bytes(int(value))


def _agreement(found: Versus, measured: Measured) -> str:
    comparison = found.agreement(measured)
    if comparison is None:
        return "not available"
    verdict = "differs" if any(comparison.reasons()) else "agrees"
    return f"{100 * comparison.agreement:.2f} % ({verdict})"


def configuration(found: Versus) -> list[list[str]]:
    """Rows of the options that differ, with the value on each engine; the first row names the engines."""
    rows = [[key, *(shortened(cell, _SHOWN) for cell in cells)] for key, cells in found.differing.items()]
    return [["", *(measured.engine.name for measured in found.engines)], *rows] if rows else []


def conclusion(found: Versus, instance: Instance | None) -> Iterator[str]:
    """Yield sentences: which engine is ahead, which answers differ, what has no figure, and where the price is from."""
    first, second, *_ = found.ranked()
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
    by_round = _by_round(instance)
    return {
        "engine": measured.engine.name,
        "python": measured.engine.python,
        "rounds": [
            {key: figure(each) for key, (_, figure) in by_round.items()}
            | {"loads": [figures.as_json() for figures in each.figures]}
            for each in measured.rounds
        ],
        "answers": comparison and comparison.as_json(),
        "no_answers": measured.no_answers or None,
    }


def picture_of(found: Versus) -> str:
    """Return the picture as SVG: medians of throughput and latencies by clients, and answers that still agree."""
    clients = [float(load.concurrency or 0) for load in found.plan.loads]
    labels = [f"{each:g}" for each in clients]
    charts = []
    for name, unit, figure, factor in (
        ("Throughput", "tokens per second", "tok/s", 1.0),
        ("Time to first token, median", "seconds", "TTFT p50 ms", 0.001),
        ("Inter-token latency, median", "seconds", "ITL p50 ms", 0.001),
    ):
        lines = []
        for measured in found.engines:
            medians = [_of_load(measured, load, _BY_LOAD[figure]).median for load in range(len(clients))]
            points = [(x, factor * y) for x, y in zip(clients, medians, strict=True)]
            lines.append(Line(measured.engine.name, points, labels))
        charts.append(Chart(name, "clients", unit, lines, log="x"))
    compared = {measured.engine.name: found.agreement(measured) for measured in found.engines[1:]}
    lines = [Line(name, each.agreeing(), steps=True) for name, each in compared.items() if each is not None]
    if lines:
        title = f"Prompts whose answers agree with those of {found.engines[0].engine.name}"
        charts.append(Chart(title, "tokens", "share", lines))
    return picture(charts)
