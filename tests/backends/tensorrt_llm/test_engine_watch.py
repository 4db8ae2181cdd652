from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm import engine_watch
from djl_trtllm.backends.tensorrt_llm.engine_watch import IterationStatistics, dead, ranks_below
from djl_trtllm.executor.protocol import Stats


class Process:
    """A process below this one."""

    def __init__(self, pid: int, *command: str) -> None:
        self.pid = pid
        self.command = command
        self.state: str = psutil.STATUS_SLEEPING

    def cmdline(self) -> Sequence[str]:
        if not self.command:
            raise psutil.AccessDenied(self.pid)
        return self.command

    def is_running(self) -> bool:
        return bool(self.state != psutil.STATUS_DEAD)

    def status(self) -> str:
        if self.state == psutil.STATUS_STOPPED:
            raise psutil.NoSuchProcess(self.pid)
        return self.state


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes below this one."""
    processes: list[Process] = []

    def children(*, recursive: bool) -> list[Process]:
        assert recursive
        return list(processes)

    fake = SimpleNamespace(
        Process=lambda: SimpleNamespace(children=children),
        Error=psutil.Error,
        STATUS_ZOMBIE=psutil.STATUS_ZOMBIE,
    )
    monkeypatch.setattr(engine_watch, "psutil", fake)
    return processes


# -- the processes of TensorRT-LLM's ranks -----------------------------------------------------------------------------


def test_a_rank_that_cannot_be_asked_is_dead_and_a_process_that_cannot_is_none(below: list[Process]) -> None:
    below += [Process(number, "python", "-m", "mpi4py.futures.server") for number in range(1, 5)] + [Process(5)]
    below.append(Process(6, "nvcc", "-m64", "-I/opt/tensorrt_llm/include"))  # compiles kernels
    ranks = ranks_below()
    assert len(ranks) == 4
    assert dead(ranks) == []
    for process, state in zip(
        below[1:], (psutil.STATUS_DEAD, psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED), strict=False
    ):
        process.state = state
    assert dead(ranks) == [2, 3, 4]


# -- iteration statistics ----------------------------------------------------------------------------------------------

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


def test_what_drafts_proposed_is_the_sum_over_iterations() -> None:
    statistics = IterationStatistics()
    for proposed, requests in ((12, 4), (9, 3)):
        drafts = {"numDraftTokens": proposed, "numAcceptedTokens": 5, "numRequestsWithDraftTokens": requests}
        statistics.take({"iter": 1, "specDecodingStats": drafts})
    statistics.take({"iter": 2, "specDecodingStats": None})
    found = statistics.stats(4)
    assert (found.draft_tokens, found.drafts) == (21, 7)
