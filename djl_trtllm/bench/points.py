"""Loads that were measured, as points for `djl_trtllm.sizing`: `bench --record` and `versus` keep them."""

import datetime
import math
from collections.abc import Iterator
from dataclasses import dataclass

from djl_trtllm.bench.figures import Distribution, Figures
from djl_trtllm.bench.session import Result
from djl_trtllm.sizing.points import Point


@dataclass(frozen=True)
class Measured:
    """What was measured: the fields of `Point` that a client of a server does not see."""

    model: str
    name: str
    engine: str
    version: str
    gpu: str
    gpus: int
    precision: str
    command: str


def points_of(result: Result, measured: Measured) -> Iterator[Point]:
    """A point for each load of clients that send one request after another, of which every request succeeded."""
    for figures in result.figures:
        if figures.concurrency is not None and figures.complete and figures.succeeded and not figures.failed:
            yield _point(result, figures, measured)


def _point(result: Result, figures: Figures, measured: Measured) -> Point:
    counted = figures.prompts_counted
    return Point(
        model=measured.model,
        name=measured.name,
        engine=measured.engine,
        version=measured.version,
        gpu=measured.gpu,
        gpus=measured.gpus,
        precision=measured.precision,
        isl=max(1, round(figures.prompt_tokens / counted) if counted else result.plan.prompt_tokens),
        osl=max(1, round(figures.output_tokens / figures.succeeded)),
        clients=figures.concurrency or 1,
        tokens_per_second=figures.tokens_per_second,
        ttft_p50=_percentile(figures.ttft, 0.5),
        ttft_p99=_percentile(figures.ttft, 0.99),
        itl=_percentile(figures.itl, 0.5),
        command=measured.command,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _percentile(values: Distribution, share: float) -> float | None:
    value = values.percentile(share)
    return None if math.isnan(value) else value
