"""Loads that were measured, as points for `djl_trtllm.sizing`: `bench --record` and `versus` keep them."""

import datetime
import math
from collections.abc import Iterator, Mapping
from typing import Any

from djl_trtllm.bench.figures import Distribution, Figures
from djl_trtllm.bench.session import Result
from djl_trtllm.sizing.points import Point


def points_of(result: Result, measured: Mapping[str, Any]) -> Iterator[Point]:
    """A point for each load of clients that send one request after another, if every request succeeded.

    `measured` has the fields of a point that a client of a server does not see: `model`, `name`, `engine`, `version`,
    `gpu`, `gpus`, `precision` and `command`.
    """
    for figures in result.figures:
        if figures.concurrency is not None and figures.complete and figures.succeeded and not figures.failed:
            yield _point(result, figures, measured)


def _point(result: Result, figures: Figures, measured: Mapping[str, Any]) -> Point:
    counted = figures.prompts_counted
    return Point(
        **measured,
        isl=max(1, round(figures.prompt_tokens / counted) if counted else result.plan.prompt_tokens),
        osl=max(1, round(figures.output_tokens / figures.succeeded)),
        clients=figures.concurrency or 1,
        tokens_per_second=figures.tokens_per_second,
        ttft_p50=_percentile(figures.ttft, 0.5),
        ttft_p99=_percentile(figures.ttft, 0.99),
        itl=_percentile(figures.itl, 0.5),
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )


def _percentile(values: Distribution, share: float) -> float | None:
    value = values.percentile(share)
    return None if math.isnan(value) else value
