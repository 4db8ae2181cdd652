"""A client with a host that is a real process, on the server's event loop and on asyncio's own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor.protocol import Start
from djl_trtllm.request import FinishReason
from tests.executor.probe import Probe, run_checked

FOR_EVER = 1 << 30

Runner = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def run_async(request: pytest.FixtureRequest) -> Runner:
    """See `run_checked`."""
    return lambda body: run_checked(body, getattr(request, "param", "uvloop"))


on_both_loops = pytest.mark.parametrize(
    "run_async", ["uvloop", pytest.param("asyncio", marks=pytest.mark.slow)], indirect=True
)


@on_both_loops
def test_a_request_comes_back_as_steps_and_close_leaves_nothing(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(max_sequences=7)
        assert probe.client.limits.max_sequences == 7
        probe.submit(1, 4)
        assert await probe.end_of(1) == [FinishReason.LENGTH]
        assert probe.tokens(1) == [5, 6, 7, 5]
        probe.submit(2, FOR_EVER)
        await probe.until(lambda: bool(probe.tokens(2)))
        await probe.client.close()
        assert probe.deaths == []

    run_async(body)


@on_both_loops
def test_a_killed_engine_process_is_reported_once_and_by_the_signals_name(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(steps_per_second=100)
        probe.submit(1, FOR_EVER)
        await probe.until(lambda: bool(probe.deltas))
        os.kill(probe.client.pid, signal.SIGKILL)
        message = await probe.death()
        assert "killed by SIGKILL" in message
        assert f"(pid {probe.client.pid})" in message
        await probe.client.close()

    run_async(body)


@on_both_loops
@pytest.mark.parametrize("after", [0.0, 0.001, 0.5])
def test_a_cancelled_start_leaves_nothing(run_async: Runner, after: float) -> None:
    async def body() -> None:
        start = asyncio.ensure_future(Probe().start(start_seconds=60))
        await asyncio.sleep(after)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

    run_async(body)


@on_both_loops
def test_a_process_that_cannot_be_spawned_is_a_start_error(
    run_async: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def body() -> None:
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(ExecutorStartError, match="could not be started"):
            await Probe().start()

    run_async(body)


def test_close_ends_a_stopped_engine_process(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start()
        os.kill(probe.client.pid, signal.SIGSTOP)
        await probe.client.close(timeout=0.1)
        assert probe.deaths == []

    run_async(body)


@pytest.mark.slow
@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_busy_engine_process_that_is_silent_is_killed_after_hang_timeout(run_async: Runner, action: str) -> None:
    async def body() -> None:
        probe = Probe(hang_timeout=0.6)
        await probe.start(faults=[{"action": action, "at_token": 1}])
        probe.busy = True
        probe.submit(1, 9)
        assert "silent for 0.6 seconds (option.executor_hang_timeout)" in await probe.death()
        await probe.client.close()

    run_async(body)


def test_a_start_error_carries_the_message_of_the_engine_process_and_the_log_its_traceback(
    run_async: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "djl_trtllm.executor.process")

    async def body() -> None:
        probe = Probe()
        with pytest.raises(ExecutorStartError, match="RuntimeError: no such engine") as caught:
            await probe.start(start_error="no such engine")
        assert "Traceback" not in str(caught.value)
        assert probe.deaths == []

    run_async(body)
    assert "Traceback (most recent call last):" in caplog.messages


@pytest.mark.slow
def test_an_executor_that_does_not_exist_is_a_start_error(run_async: Runner) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match="nonesuch"):
            await Probe().client.start(Start("djl_trtllm.nonesuch:Nonesuch", {}), 60)

    run_async(body)


@on_both_loops
def test_an_engine_that_raises_is_reported_with_its_message(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(faults=[{"action": "raise", "at_token": 2}])
        probe.submit(1, 9)
        message = await probe.death()
        assert "RuntimeError: scripted engine failure" in message
        assert "Traceback" not in message
        assert len(probe.deltas) == 2
        await probe.client.close()

    run_async(body)


def test_an_engine_process_outlives_signals_to_its_process_group_but_not_its_server(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(probe.client.pid, number)
        probe.submit(1, 2)
        assert await probe.end_of(1) == [FinishReason.LENGTH]
        probe.client._transport.abort()
        assert "exited with status 0" in await probe.death()
        await probe.client.close()

    run_async(body)
