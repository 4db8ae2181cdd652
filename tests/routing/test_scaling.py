"""How many replicas a fleet should have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.errors import ConfigError
from djl_trtllm.routing.scaling import Autoscaling, QueueAndCachePolicy
from tests.support.tables import by_rows, by_table


@by_table("text", "scaling")
def test_autoscaling_is_two_or_three_numbers(text: str, scaling: list[int | None]) -> None:
    assert [*Autoscaling.parse(text)] == scaling


@by_table("text", "expected")
def test_autoscaling_that_is_not_two_or_three_numbers_in_order_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"autoscale={text}: .*{expected}"):
        Autoscaling.parse(text)


def snapshot(present: int, metrics: dict[str, list[float]]) -> Any:
    return SimpleNamespace(
        aggregated_metrics={name: dict(enumerate(values)) for name, values in metrics.items()},
        current_num_replicas=present,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=20,
    )


@by_table("present", "metrics", "wanted")
def test_there_are_as_many_replicas_as_keep_the_concurrency_on_each(
    present: int, metrics: dict[str, list[float]], wanted: int
) -> None:
    assert QueueAndCachePolicy(concurrency=10)(snapshot(present, metrics)) == (wanted, {})


@by_rows(
    ("sequences", "places", "wanted"),
    [
        (200.0, [256.0, 256.0], 2),  # 179 on each
        (200.0, [100.0, 0.0], 3),  # one has no engine for a moment: 70 on each
        (3.0, [1.0, 1.0], 3),  # one on each
        (200.0, [0.0, 0.0], 2),  # none says it: as many as there are
        (200.0, [], 2),
    ],
)
def test_the_concurrency_is_seven_tenths_of_the_batch_that_replicas_report(
    sequences: float, places: list[float], wanted: int
) -> None:
    metrics = {"waiting": [sequences - 1.0, 0.0], "running": [0.0, 1.0], "places": places}
    assert QueueAndCachePolicy()(snapshot(2, metrics)) == (wanted, {})
