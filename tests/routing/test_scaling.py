"""How many replicas a fleet should have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.errors import ConfigError
from djl_trtllm.routing.scaling import Autoscaling, QueueAndCachePolicy
from tests.support.tables import by_table


@by_table("text", "batch", "scaling")
def test_autoscaling_has_a_concurrency_of_seven_tenths_of_the_batch(text: str, batch: int, scaling: list[int]) -> None:
    assert [*Autoscaling.parse(text, batch)] == scaling


@by_table("text", "expected")
def test_autoscaling_that_is_not_two_or_three_numbers_in_order_is_refused(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"autoscale={text}: .*{expected}"):
        Autoscaling.parse(text, 64)


@by_table("present", "metrics", "wanted")
def test_there_are_as_many_replicas_as_keep_the_concurrency_on_each(
    present: int, metrics: dict[str, list[float]], wanted: int
) -> None:
    context: Any = SimpleNamespace(
        aggregated_metrics={name: dict(enumerate(values)) for name, values in metrics.items()},
        current_num_replicas=present,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=6,
    )
    assert QueueAndCachePolicy(concurrency=10)(context) == (wanted, {})
