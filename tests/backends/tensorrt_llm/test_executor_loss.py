"""Losses of TensorRT-LLM's real worker processes, and loads that fail; TensorRT-LLM is the fake."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal

import psutil
import pytest

from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.request import FinishReason
from tests.backends.tensorrt_llm.machine import BACKENDS, LONG, PROMPT, Machine, rank, run
from tests.executor.probe import Probe, run_checked

pytestmark = pytest.mark.slow

# -- loss of the engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_killed_worker_is_reported_at_once_under_many_streams(machine: Machine, backend: str) -> None:
    async def body() -> Probe:
        probe = await machine.start(backend, {"steps_per_second": 50})
        for number in range(64):
            probe.submit(number, LONG, PROMPT)
        await probe.until(lambda: all(probe.tokens(number) for number in range(64)))
        worker = rank(probe)
        worker.kill()
        message = await probe.death()
        assert "a worker process of TensorRT-LLM is gone" in message
        assert str(worker.pid) in message
        return probe

    run(body)


def test_a_worker_that_is_killed_while_nothing_runs_is_reported_too(machine: Machine) -> None:
    async def body() -> Probe:
        probe = await machine.start()
        rank(probe).kill()
        assert "a worker process of TensorRT-LLM is gone" in await probe.death()
        return probe

    run(body)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_silent_worker_is_reported_after_the_timeout(machine: Machine, backend: str) -> None:
    async def body() -> Probe:
        probe = await machine.start(backend, {"steps_per_second": 50}, hang_timeout=1.0)
        for number in range(8):
            probe.submit(number, LONG, PROMPT)
        await probe.until(lambda: all(probe.tokens(number) for number in range(8)))
        os.kill(rank(probe).pid, signal.SIGSTOP)
        assert "TensorRT-LLM has been silent for 1 seconds with 8 requests in it" in await probe.death()
        return probe

    run(body)


@pytest.mark.parametrize(("version", "backend"), [("1.2.1", "tensorrt"), ("1.2.1", "pytorch"), ("1.3.0", "pytorch")])
def test_an_error_of_the_engine_is_reported_in_its_own_words_with_the_next_request(
    machine: Machine, version: str, backend: str
) -> None:
    """TensorRT-LLM's worker keeps the error of its other threads until then."""

    async def body() -> Probe:
        fault = {"action": "raise", "at_token": 2, "max_new_tokens": 77}
        probe = await machine.start(backend, {"steps_per_second": 50, "faults": [fault]}, version=version)
        for number in itertools.count():
            if probe.deaths:
                break
            probe.submit(number, 77 if number == 3 else LONG, PROMPT)
            await asyncio.sleep(0.05)
        assert "CppExecutorError: scripted engine failure" in await probe.death()
        # Their answer is the loss, not an error of their own.
        assert [delta for delta in probe.deltas if delta.finish] == []
        return probe

    run(body)


def test_an_error_of_the_engine_is_found_where_no_request_follows(machine: Machine) -> None:
    async def body() -> Probe:
        fault = {"action": "raise", "at_token": 2, "max_new_tokens": 77}
        probe = await machine.start(script={"steps_per_second": 50, "faults": [fault]}, hang_timeout=300.0)
        probe.submit(1, 77, PROMPT)
        assert "CppExecutorError: scripted engine failure" in await probe.death()
        return probe

    run(body)


@pytest.mark.parametrize(
    ("backend", "action", "message"),
    [
        ("tensorrt", "cuda", "an illegal memory access was encountered"),
        ("pytorch", "segfault", "a worker process of TensorRT-LLM is gone"),
    ],
)
def test_an_engine_that_fails_is_reported_at_once(machine: Machine, backend: str, action: str, message: str) -> None:
    async def body() -> Probe:
        fault = {"action": action, "at_token": 2, "max_new_tokens": 77}
        probe = await machine.start(backend, {"steps_per_second": 50, "faults": [fault]})
        for number in range(8):
            probe.submit(number, 77 if number == 3 else LONG, PROMPT)
        assert message in await probe.death()
        # Their answer is the loss, not an error of their own.
        assert [delta for delta in probe.deltas if delta.finish] == []
        return probe

    run(body)


def test_an_engine_whose_loop_has_ended_is_reported_also_where_every_client_gives_up(machine: Machine) -> None:
    """PyExecutor's loop ends with an iteration that fails; its process goes on, takes requests and answers none."""

    async def body() -> Probe:
        fault = {"action": "forward", "at_token": 2, "max_new_tokens": 77, "message": "a shape does not fit"}
        probe = await machine.start(script={"steps_per_second": 50, "faults": [fault]}, hang_timeout=4.0)
        probe.submit(1, 77, PROMPT)
        probe.submit(2, LONG, PROMPT)
        for number in (1, 2):
            assert await probe.end_of(number) == [FinishReason.ERROR]
            assert probe.of(number)[-1].error == "a shape does not fit"
        probe.submit(3, LONG, PROMPT)
        await asyncio.sleep(0.2)
        probe.client.cancel(3)
        assert await probe.end_of(3) == [FinishReason.CANCELLED]
        assert "TensorRT-LLM has been silent for 4 seconds with 1 requests in it" in await probe.death()
        return probe

    run(body)


def test_a_shutdown_that_the_worker_does_not_follow_is_bounded(machine: Machine) -> None:
    async def body() -> Probe:
        probe = await machine.start()
        os.kill(rank(probe).pid, signal.SIGSTOP)
        host = psutil.Process(probe.client.pid)
        await probe.client.close(timeout=200)
        assert not host.is_running()
        return probe

    run(body)


# -- loading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "error", "message"),
    [
        ("pytorch", "oom", "insufficient GPU memory"),
        ("tensorrt", "oom", "out of memory"),
        ("pytorch", "die", "Executor worker died during initialization|died|killed|gone"),
    ],
)
def test_a_load_that_fails_is_reported_with_its_cause(machine: Machine, backend: str, error: str, message: str) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match=message):
            await machine.start(backend, {"load_error": error}, timeout=60.0)

    run_checked(body)


def test_a_load_that_hangs_is_ended_with_its_workers(machine: Machine) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match=r"not loaded within 4 seconds"):
            await machine.start(script={"load_error": "hang"}, timeout=4.0)

    run_checked(body)
    assert not [process for process in psutil.process_iter() if str(machine._directory) in _command(process)]


def _command(process: psutil.Process) -> str:
    try:
        return " ".join([*process.cmdline(), process.environ().get("FAKE_TENSORRT_LLM_LOG", "")])
    except psutil.Error:
        return ""
