from __future__ import annotations

import pytest

from djl_trtllm.backends.tensorrt_llm.iteration_statistics import IterationStatistics
from djl_trtllm.executor.protocol import Stats

ITERATION = {
    "iter": 812,
    "iterLatencyMS": 12.5,
    "numQueuedRequests": 3,
    "kvCacheStats": {"maxNumBlocks": 400, "usedNumBlocks": 100, "cacheHitRate": 0.25},
    "inflightBatchingStats": {"numPausedRequests": 2},
}


def test_an_iteration_is_shown_with_the_requests_that_are_known() -> None:
    statistics = IterationStatistics()
    statistics.take(ITERATION)
    assert statistics.stats(10) == Stats(
        running=7,
        kv_usage=0.25,
        queued=3,
        paused=2,
        iterations=812,
        iteration_seconds=0.0125,
        kv_blocks=400,
        kv_blocks_used=100,
        kv_hit_rate=0.25,
    )


@pytest.mark.parametrize(
    ("queued", "active", "running", "expected"),
    [(0, 4, 6, (4, 2)), (1, 4, 4, (3, 1)), (0, 4, 3, (3, 0)), (0, None, 3, (3, 0)), (None, 4, 6, (4, 2))],
)
def test_in_pytorchs_queue_are_the_requests_that_are_not_active(
    queued: int | None, active: int | None, running: int, expected: tuple[int, int]
) -> None:
    """Its own number is that of the loop's inbox."""
    statistics = IterationStatistics(counts_queued=False)
    statistics.take({"iter": 1, "numQueuedRequests": queued, "numActiveRequests": active})
    found = statistics.stats(running)
    assert (found.running, found.queued) == expected


def test_without_requests_nothing_is_used() -> None:
    statistics = IterationStatistics()
    statistics.take(ITERATION)
    idle = statistics.stats(0)
    assert (idle.running, idle.queued, idle.paused, idle.kv_usage, idle.kv_blocks_used) == (0, 0, 0, 0.0, 0)
    assert (idle.iterations, idle.kv_blocks) == (812, 400)


def test_what_is_not_reported_is_unknown_and_not_0() -> None:
    statistics = IterationStatistics()
    assert statistics.stats(4) == Stats(running=4)
    statistics.take({"iter": 1, "kvCacheStats": None, "inflightBatchingStats": {}})
    assert statistics.stats(4) == Stats(running=4, iterations=1)
