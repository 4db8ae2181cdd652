"""What TensorRT-LLM reports of itself: its processes, statistics and errors, and a probe where it is silent."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from queue import Queue
from types import SimpleNamespace

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm import engine_watch, executor as module
from djl_trtllm.backends.tensorrt_llm.engine_watch import IterationStatistics, dead, ranks_below, trouble_of
from djl_trtllm.backends.tensorrt_llm.executor import EngineLostError
from djl_trtllm.executor.protocol import Stats
from tests.backends.tensorrt_llm.kit import MakeEngine, RequestError, played


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
    statistics = IterationStatistics(counts_queued=True)
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
    statistics = IterationStatistics(counts_queued=True)
    statistics.take(ITERATION)
    idle = statistics.stats(0)
    assert (idle.running, idle.queued, idle.paused, idle.kv_usage, idle.kv_blocks_used) == (0, 0, 0, 0.0, 0)
    assert (idle.iterations, idle.kv_blocks) == (812, 400)


def test_what_is_not_reported_is_unknown_and_not_0() -> None:
    statistics = IterationStatistics(counts_queued=True)
    assert statistics.stats(4) == Stats(running=4)
    statistics.take({"iter": 1, "kvCacheStats": None, "inflightBatchingStats": {}})
    assert statistics.stats(4) == Stats(running=4, iterations=1)
    statistics.take({"kvCacheStats": {"maxNumBlocks": 400}})
    assert statistics.stats(4) == Stats(running=4, kv_blocks=400)
    statistics.take({"kvCacheStats": {"maxNumBlocks": 0, "usedNumBlocks": 0}})
    assert statistics.stats(4) == Stats(running=4)


def test_what_drafts_proposed_is_the_sum_over_iterations() -> None:
    statistics = IterationStatistics(counts_queued=True)
    for proposed, requests in ((12, 4), (9, 3)):
        drafts = {"numDraftTokens": proposed, "numAcceptedTokens": 5, "numRequestsWithDraftTokens": requests}
        statistics.take({"iter": 1, "specDecodingStats": drafts})
    statistics.take({"iter": 2, "specDecodingStats": None})
    found = statistics.stats(4)
    assert (found.draft_tokens, found.drafts) == (21, 7)


# -- what it knows of its state, and a probe where it is silent --------------------------------------------------------


def llm(*errors: Exception, is_shutdown: bool = False, **others: object) -> SimpleNamespace:
    queue: Queue[Exception] = Queue()
    for error in errors:
        queue.put(error)
    return SimpleNamespace(_executor=SimpleNamespace(_error_queue=queue, is_shutdown=lambda: is_shutdown), **others)


def test_the_first_error_of_a_background_thread_is_the_trouble_and_stays_where_it_is() -> None:
    failed = llm(RuntimeError("in a thread"), OSError("later"), is_shutdown=True, _check_health=lambda: True)
    assert [trouble_of(failed) for _ in range(2)] == ["RuntimeError: in a thread"] * 2


def test_a_version_that_knows_how_it_is_is_asked_and_nothing_else() -> None:
    assert trouble_of(llm(is_shutdown=True, _check_health=lambda: True)) is None
    assert trouble_of(llm(_check_health=lambda: False)) == "it reports that it is not healthy"


def test_one_that_has_shut_down_is_in_trouble() -> None:
    assert trouble_of(llm()) is None
    assert trouble_of(llm(is_shutdown=True)) == "it has shut down"
    for without in (SimpleNamespace(), SimpleNamespace(_executor=None)):
        assert trouble_of(without) == "it has shut down"
    # As with an executor in the process itself, of which nothing is known.
    assert trouble_of(SimpleNamespace(_executor=object())) is None


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What compiles below the process."""
    running: list[str] = []
    monkeypatch.setattr(module, "compiler_below", lambda: running[0] if running else None)
    return running


@played
async def test_the_time_of_a_compiler_is_no_silence_also_for_a_request_that_is_aborted(
    make: MakeEngine, compilers: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    engine = await make.begun(hang_timeout=10.0, compile_timeout=100.0)
    engine.submit(1).say(7)
    await asyncio.sleep(1)
    engine.executor.cancel(1)
    compilers.append("nvcc (process 7)")
    await asyncio.sleep(90)
    compilers.clear()
    await asyncio.sleep(4)
    assert not engine.running.done()
    assert capfd.readouterr().out.count("nvcc (process 7) compiles kernels") == 1
    # The silence before the compiler came is a part of it.
    await asyncio.sleep(4)
    with pytest.raises(EngineLostError, match=r"10 seconds"):
        await asyncio.wait_for(engine.running, 4)


@played
async def test_a_compiler_may_take_as_long_as_loading(make: MakeEngine, compilers: list[str]) -> None:
    engine, loop = await make.begun(hang_timeout=10.0, compile_timeout=100.0), asyncio.get_running_loop()
    compilers.append("ninja (process 7)")
    began = loop.time()
    engine.submit(1)
    with pytest.raises(EngineLostError, match=r"100 seconds, and ninja \(process 7\) still runs"):
        await engine.running
    assert loop.time() - began == pytest.approx(100.5)


@played
async def test_an_error_that_waits_is_the_loss_before_another_request_is_sent(make: MakeEngine) -> None:
    """TensorRT-LLM would first send aborts to its worker, and never come back if that is gone."""
    engine = await make.begun()
    engine.llm.errors.put(ArithmeticError("in the worker"))
    engine.submit(1)
    with pytest.raises(ArithmeticError, match="in the worker"):
        await engine.running
    assert engine.llm.calls == []


@played
async def test_a_silent_engine_is_probed_once_and_one_that_answers_is_not(make: MakeEngine) -> None:
    engine = await make.begun(hang_timeout=60.0)
    await asyncio.sleep(30)
    assert engine.llm.calls == []  # idle
    result = engine.submit(1)
    for _ in range(3):
        await asyncio.sleep(4)
        result.say(7)
    assert len(engine.llm.calls) == 1
    await asyncio.sleep(5.6)
    assert len(engine.llm.calls) == 2
    assert engine.llm.calls[1]["inputs"] == [5]
    assert engine.llm.calls[1]["sampling_params"].max_tokens == 1
    await asyncio.sleep(40)
    assert len(engine.llm.calls) == 2
    result.say(8)
    await asyncio.sleep(6.5)
    assert len(engine.llm.calls) == 3


@pytest.mark.parametrize(("error", "lost"), [(RuntimeError("in the worker"), True), (RequestError("too long"), False)])
@played
async def test_what_a_probe_is_answered_may_be_the_loss(make: MakeEngine, error: Exception, lost: bool) -> None:
    engine = await make.begun(hang_timeout=60.0)
    engine.submit(1)
    engine.llm.refusal = error
    await asyncio.sleep(6)
    assert engine.running.done() is lost
    if lost:
        with pytest.raises(RuntimeError, match="in the worker"):
            await engine.running
