from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.cluster.autoscaling import QueueAndCachePolicy


def context(current: int, **metrics: list[float]) -> Any:
    by_replica = {name: dict(enumerate(values)) for name, values in metrics.items()}
    return SimpleNamespace(
        aggregated_metrics=by_replica,
        current_num_replicas=current,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=6,
    )


@pytest.mark.parametrize(
    ("waiting", "running", "wanted"),
    [([0, 0], [0, 0], 1), ([0, 0], [10, 10], 2), ([1, 0], [10, 10], 3), ([500, 0], [10, 10], 4)],
)
def test_there_are_as_many_replicas_as_keep_the_concurrency_on_each(
    waiting: list[float], running: list[float], wanted: int
) -> None:
    assert QueueAndCachePolicy(concurrency=10)(context(2, waiting=waiting, running=running)) == (wanted, {})


@pytest.mark.parametrize(
    ("present", "waiting", "wanted"),
    [(0, 900, 2), (1, 900, 3), (3, 900, 6), (6, 900, 6), (1, 0, 1), (4, 0, 3), (6, 0, 5)],
)
def test_a_decision_doubles_the_replicas_or_ends_a_fifth_of_them_at_most(
    present: int, waiting: float, wanted: int
) -> None:
    assert QueueAndCachePolicy(concurrency=10)(context(present, waiting=[waiting]))[0] == wanted


def test_of_many_replicas_a_fifth_ends() -> None:
    many = context(20)
    many.capacity_adjusted_max_replicas = 50
    assert QueueAndCachePolicy(concurrency=10)(many) == (16, {})


def test_a_replica_whose_cache_is_full_gets_another_one_beside_it() -> None:
    policy = QueueAndCachePolicy(concurrency=10)
    few = context(2, waiting=[0, 0], running=[2, 2], kv_usage=[0.99, 0.4])
    assert policy(few) == (3, {})


def test_replicas_that_have_not_reported_yet_are_kept_at_the_minimum() -> None:
    assert QueueAndCachePolicy(concurrency=10)(context(1)) == (1, {})


def test_ray_calls_it_with_its_own_snapshots() -> None:
    config = pytest.importorskip("ray.serve.config", reason="Ray is not installed (the extra `ray`)")
    made = config.AutoscalingPolicy(policy_function=QueueAndCachePolicy, policy_kwargs={"concurrency": 10})
    names = list(inspect.signature(config.AutoscalingContext.__init__).parameters)[1:]
    replicas = [f"replica-{number}" for number in range(2)]
    figures = {"waiting": dict.fromkeys(replicas, 5.0), "running": dict.fromkeys(replicas, 10.0)}
    known = {
        "current_num_replicas": 2,
        "aggregated_metrics": lambda: figures,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 6,
    }
    snapshot = config.AutoscalingContext(**(dict.fromkeys(names) | known))
    assert made.policy_kwargs == {"concurrency": 10}
    assert QueueAndCachePolicy(**made.policy_kwargs)(snapshot) == (3, {})
