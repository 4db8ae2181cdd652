"""TensorRT-LLM's executor watches its engine, and ends it. The LLM is played, time is virtual."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm import executor
from djl_trtllm.backends.tensorrt_llm.executor import EngineLostError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.request import FinishReason
from tests.backends.tensorrt_llm.played_llm import MakeEngine, RequestError
from tests.support.virtual_time import in_virtual_time

SILENT = "TensorRT-LLM has been silent for {} seconds with {} requests in it (option.executor_hang_timeout)"


# -- the watch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hang_timeout", "tick"), [(60.0, 0.5), (4.0, 0.5), (1.0, 0.125)])
def test_an_engine_that_is_silent_for_the_timeout_is_lost_and_the_server_is_kept_quiet_until_then(
    make: MakeEngine, hang_timeout: float, tick: float
) -> None:
    """The server's own watch has the same timeout: this one's message says more."""

    @in_virtual_time
    async def body() -> None:
        engine, loop = make(hang_timeout=hang_timeout), asyncio.get_running_loop()
        began = loop.time()
        await engine.begin()
        engine.submit(1)
        engine.submit(2)
        with pytest.raises(EngineLostError) as caught:
            await engine.running
        assert str(caught.value) == SILENT.format(f"{hang_timeout:g}", 2)
        assert loop.time() - began == pytest.approx(hang_timeout + tick)
        # Signs of life, often enough for a watch that looks eight times per timeout.
        gaps = [later - earlier for earlier, later in zip([began, *engine.sent_at], engine.sent_at, strict=False)]
        assert max(gaps) <= 2 * tick
        assert engine.deltas == []
        await engine.ended()

    body()


def test_an_engine_that_answers_is_not_silent_and_one_without_requests_neither(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=4.0)
        await engine.begin()
        await asyncio.sleep(60)
        assert engine.steps == []
        result = engine.submit(1)
        for _ in range(10):
            await asyncio.sleep(3)
            result.say(7)
        await asyncio.sleep(0.1)
        assert not engine.running.done()
        await engine.ended()

    body()


def test_the_silence_of_an_engine_goes_on_when_its_clients_have_given_up(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine, loop = make(hang_timeout=8.0), asyncio.get_running_loop()
        await engine.begin()
        began = loop.time()
        engine.submit(1)
        await asyncio.sleep(0.6)
        engine.executor.cancel(1)
        await asyncio.sleep(3)
        assert engine.deltas == [Delta(1, [], None, FinishReason.CANCELLED)]
        assert engine.executor.stats().running == 0
        with pytest.raises(EngineLostError) as caught:
            await engine.running
        assert str(caught.value) == SILENT.format("8", 1)
        assert loop.time() - began == pytest.approx(8.5)
        await engine.ended()

    body()


def test_statistics_of_iterations_before_an_abort_are_no_sign_of_life_after_it(make: MakeEngine) -> None:
    """They are read once a second, and those of earlier requests with the first reading of the next."""

    @in_virtual_time
    async def body() -> None:
        engine, loop = make(hang_timeout=8.0, iteration_stats=True), asyncio.get_running_loop()
        await engine.begin()
        engine.submit(1).say(7, end="length")
        await asyncio.sleep(5.1)
        engine.llm.iterations = lambda: [{"iter": 1}] if loop.time() - began < 1.5 else []
        began = loop.time()
        engine.submit(2)
        await asyncio.sleep(0.3)
        engine.executor.cancel(2)
        with pytest.raises(EngineLostError, match="has been silent for 8 seconds with 1 requests in it"):
            await engine.running
        assert loop.time() - began < 10
        await engine.ended()

    body()


@pytest.mark.parametrize("answer", ["its own", "its error", "another's", "statistics"])
def test_any_sign_of_life_after_an_abort_ends_the_doubt_that_its_silence_raised(make: MakeEngine, answer: str) -> None:
    """The PyTorch backend never answers a request that was aborted while it waited."""

    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=8.0, iteration_stats=answer == "statistics")
        await engine.begin()
        first, second = engine.submit(1), engine.submit(2)
        second.say(7, end=None if answer == "another's" else "length")
        await asyncio.sleep(0.6)
        engine.executor.cancel(1)
        await asyncio.sleep(4)
        match answer:
            case "its own":
                first.say(end="cancelled")
            case "its error":
                first.fail(RequestError("no room for it"))
            case "another's":
                second.say(8, end="length")
            case _:
                engine.llm.iterations = lambda: [{"iter": 1}]
        await asyncio.sleep(60)
        assert not engine.running.done()
        assert [delta.finish for delta in engine.deltas if delta.request_id == 1] == [FinishReason.CANCELLED]
        await engine.ended()

    body()


def test_a_request_that_is_dropped_while_the_engine_answers_others_raises_no_doubt(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=8.0)
        await engine.begin()
        engine.submit(1)
        engine.executor.cancel(1)
        engine.submit(2).say(7, end="length")
        await asyncio.sleep(60)
        assert not engine.running.done()
        await engine.ended()

    body()


def test_an_engine_that_is_lost_behind_an_aborted_request_is_reported(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=8.0)
        await engine.begin()
        result = engine.submit(1)
        engine.executor.cancel(1)
        await asyncio.sleep(3)
        result.fail(RuntimeError("the proxy is gone"))
        with pytest.raises(RuntimeError, match="the proxy is gone"):
            await engine.running
        await engine.ended()

    body()


def test_statistics_prove_that_an_engine_without_tokens_is_alive(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=4.0, iteration_stats=True)
        count = itertools.count(1)
        engine.llm.iterations = lambda: [{"iter": next(count), "numQueuedRequests": 1}]
        await engine.begin()
        engine.submit(1)
        engine.submit(2)
        await asyncio.sleep(30.5)
        assert not engine.running.done()
        stats = engine.executor.stats()
        assert (stats.running, stats.queued, stats.iterations) == (1, 1, 30)
        await engine.ended()

    body()


def test_without_statistics_only_responses_count(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make(hang_timeout=4.0)
        engine.llm.iterations = lambda: [{"iter": 1}]
        await engine.begin()
        engine.submit(1)
        with pytest.raises(EngineLostError, match="has been silent for 4 seconds with 1 requests"):
            await engine.running
        await engine.ended()

    body()


def test_statistics_that_cannot_be_read_are_gone_without(make: MakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    def iterations() -> list[dict[str, object]]:
        raise OSError("no statistics")

    @in_virtual_time
    async def body() -> None:
        engine = make(iteration_stats=True)
        engine.llm.iterations = iterations
        await engine.begin()
        result = engine.submit(1)
        await asyncio.sleep(3)
        result.say(7, end="length")
        await asyncio.sleep(0.1)
        assert engine.deltas == [Delta(1, [7], None, FinishReason.LENGTH)]
        await engine.ended()

    body()
    captured = capsys.readouterr()
    assert captured.out.count("iteration statistics cannot be read; the server goes on without them") == 1
    assert "OSError: no statistics" in captured.err


# -- whether it is there -----------------------------------------------------------------------------------------------


def test_a_worker_that_has_ended_is_reported_by_its_id(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    dead: list[int] = []
    monkeypatch.setattr(executor, "dead", lambda ranks: dead)
    engine = make()
    engine.executor.check()
    dead += [7, 70]
    with pytest.raises(EngineLostError, match=r"a worker process of TensorRT-LLM is gone \(pid 7, 70\)"):
        engine.executor.check()


def test_what_ended_a_worker_says_more_than_its_end_also_where_it_comes_later(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        engine.llm._executor._error_queue.put(RuntimeError("in the worker"))

    monkeypatch.setattr(executor, "dead", lambda ranks: [7])
    monkeypatch.setattr(time, "sleep", sleep)
    engine = make()
    with pytest.raises(EngineLostError, match="TensorRT-LLM cannot go on: RuntimeError: in the worker"):
        engine.executor.check()


def test_an_error_that_a_request_was_given_says_more_than_the_shutdown_that_follows(make: MakeEngine) -> None:
    async def body() -> None:
        engine = make()
        await engine.begin()
        engine.llm.refusal = RuntimeError("in the worker")
        engine.submit(1)
        engine.llm._executor = SimpleNamespace(is_shutdown=lambda: True)
        with pytest.raises(RuntimeError, match="in the worker"):
            engine.executor.check()
        await engine.ended()

    asyncio.run(body())


def test_an_error_of_a_background_thread_is_reported(make: MakeEngine) -> None:
    engine = make()
    engine.llm._executor._error_queue.put(RuntimeError("in a thread"))
    for _ in range(2):  # it stays where it is
        with pytest.raises(EngineLostError, match="TensorRT-LLM cannot go on: RuntimeError: in a thread"):
            engine.executor.check()


def test_workers_are_those_below_this_process(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = SimpleNamespace(pid=7, cmdline=lambda: ["python", "-m", "mpi4py"])
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [rank])
    assert make().executor.details["worker processes"] == 1


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_shuts_the_engine_down_and_follows_no_request_any_more(make: MakeEngine) -> None:
    @in_virtual_time
    async def body() -> None:
        engine = make()
        await engine.begin()
        engine.submit(1)
        engine.submit(2)
        engine.executor.cancel(2)
        await asyncio.sleep(2)
        await engine.executor.close()
        assert engine.llm.shutdowns == 1
        await engine.ended()
        followed = [*engine.executor._requests.values(), *engine.executor._unanswered]
        assert [request.task.cancelled() for request in followed] == [True, True]

    body()


def test_a_shutdown_that_hangs_is_waited_for_a_few_seconds(make: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djl_trtllm.backends.tensorrt_llm.executor._SHUTDOWN_SECONDS", 0.05)
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    @in_virtual_time
    async def body() -> None:
        engine = make()
        engine.llm.shut_down = hang
        await engine.begin()
        await engine.executor.close()
        assert engine.llm.shutdowns == 1
        await engine.ended()

    try:
        body()
    finally:
        release.set()


# -- the rate of responses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "interval"), [("pytorch", 1), ("pytorch", 4), ("tensorrt", None)])
def test_the_rate_of_responses_is_watched_where_an_option_can_lower_it(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], backend: str, interval: int
) -> None:
    class Rate:
        def __init__(self, interval: int) -> None:
            intervals.append(interval)

        def look(self, responses: int, streams: int) -> str | None:
            looks.append((responses, streams))
            return "set it to 9"

    intervals: list[int] = []
    looks: list[tuple[int, int]] = []
    monkeypatch.setattr(executor, "ResponseRate", Rate)

    @in_virtual_time
    async def body() -> None:
        arguments = {} if interval in (1, None) else {"stream_interval": interval}
        engine = make(backend=backend, arguments=arguments)
        await engine.begin()
        result = engine.submit(1)
        result.say(7)
        result.say(8)
        await asyncio.sleep(0.6)
        await engine.ended()

    body()
    assert intervals == ([] if interval is None else [interval])
    assert looks == ([] if interval is None else [(2, 1)])
    assert capfd.readouterr().out == ("" if interval is None else "set it to 9\n")
