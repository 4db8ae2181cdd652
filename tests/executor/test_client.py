from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from djl_trtllm.errors import ExecutorStartError
from djl_trtllm.executor import client as client_module
from djl_trtllm.executor.protocol import Finish, Start, Step

from .probe import Probe, children, run_checked

DETECTION = 2.0
"""Seconds within which a death must be told once it is noticed; generous, the machine may be busy."""


Runner = Callable[[Callable[[], Awaitable[None]]], None]


@pytest.fixture
def run_async(request: pytest.FixtureRequest) -> Runner:
    """See `run_checked`."""
    return lambda body: run_checked(body, getattr(request, "param", "uvloop"))


on_both_loops = pytest.mark.parametrize("run_async", ["uvloop", "asyncio"], indirect=True)


@on_both_loops
def test_a_request_comes_back_as_steps_and_close_leaves_nothing(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(max_sequences=7)
        assert probe.client.limits.max_sequences == 7
        probe.submit(1, 4)
        await probe.until(lambda: any(delta.finish for delta in probe.deltas))
        assert [token for delta in probe.deltas for token in delta.token_ids] == [5, 6, 7, 5]
        await probe.client.close()
        assert probe.deaths == []
        probe.submit(2, 4)  # nobody hears it, and nothing breaks
        probe.client.cancel(2)

    run_async(body)


def test_a_cancelled_request_ends_with_a_late_delta(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(steps_per_second=100)
        probe.submit(1, 100_000)
        await probe.until(lambda: bool(probe.deltas))
        probe.client.cancel(1)
        await probe.until(lambda: probe.deltas[-1].finish == Finish.CANCELLED)
        await probe.client.close()

    run_async(body)


@on_both_loops
def test_close_with_requests_running_is_quick_and_is_no_death(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start()
        probe.submit(1, 1 << 30)
        await probe.until(lambda: bool(probe.deltas))
        await probe.client.close()
        assert probe.deaths == []

    run_async(body)


def test_close_ends_a_host_that_does_not_react(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start()
        os.kill(probe.client.pid, signal.SIGSTOP)
        await probe.client.close(timeout=0.3)
        assert probe.deaths == []

    run_async(body)


def test_a_start_error_carries_the_hosts_message_and_the_log_its_traceback(
    run_async: Runner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "djl_trtllm.executor.host")

    async def body() -> None:
        probe = Probe()
        with pytest.raises(ExecutorStartError, match="RuntimeError: no such engine") as caught:
            await probe.start(start_error="no such engine")
        assert "Traceback" not in str(caught.value)
        assert probe.deaths == []

    run_async(body)
    assert "Traceback (most recent call last):" in caplog.messages


def test_an_executor_that_cannot_be_imported_is_a_start_error(run_async: Runner) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match="nonesuch"):
            await Probe().client.start(Start("nonesuch", {}), 60)

    run_async(body)


def test_a_start_that_takes_too_long_is_ended(run_async: Runner) -> None:
    async def body() -> None:
        with pytest.raises(ExecutorStartError, match=r"not loaded within 0\.5 seconds \(option\.model_loading_timeout"):
            await Probe().start(timeout=0.5, start_seconds=60)

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
        monkeypatch.setattr(client_module.sys, "executable", str(tmp_path / "python"))
        with pytest.raises(ExecutorStartError, match="could not be started"):
            await Probe().start()

    run_async(body)


@on_both_loops
def test_a_killed_host_is_told_once_and_by_the_signals_name(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(steps_per_second=100)
        probe.submit(1, 1 << 30)
        await probe.until(lambda: bool(probe.deltas))
        os.kill(probe.client.pid, signal.SIGKILL)
        killed = time.monotonic()
        message = await probe.death()
        assert time.monotonic() - killed < DETECTION
        assert "killed by SIGKILL" in message
        assert f"(pid {probe.client.pid})" in message
        await probe.client.close()

    run_async(body)


@on_both_loops
def test_an_engine_that_raises_is_told_with_its_message(run_async: Runner) -> None:
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


def test_a_host_that_exits_is_told_with_its_status(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start(faults=[{"action": "exit", "at_token": 1}])
        probe.submit(1, 9)
        assert "exited with status 3" in await probe.death()
        await probe.client.close()

    run_async(body)


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_busy_host_that_is_silent_is_killed_after_hang_timeout(run_async: Runner, action: str) -> None:
    async def body() -> None:
        others = children()
        probe = Probe(hang_timeout=0.6)
        await probe.start(faults=[{"action": action, "at_token": 1}])
        probe.busy = True
        probe.submit(1, 9)
        assert "silent for 0.6 seconds (option.executor_hang_timeout)" in await probe.death()
        assert children() <= others
        await probe.client.close()

    run_async(body)


def test_a_stopped_idle_host_is_noticed_by_a_ping(run_async: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_IDLE_PING_SECONDS", 0.2)

    async def body() -> None:
        probe = Probe(hang_timeout=0.6)
        await probe.start()
        await asyncio.sleep(1.0)
        assert probe.deaths == []  # it answers its pings
        os.kill(probe.client.pid, signal.SIGSTOP)
        assert "silent for" in await probe.death()
        await probe.client.close()

    run_async(body)


def test_a_busy_host_that_sends_is_never_taken_for_hung(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe(hang_timeout=0.5)
        await probe.start(steps_per_second=20)
        probe.busy = True
        probe.submit(1, 30)
        await probe.until(lambda: any(delta.finish for delta in probe.deltas))
        assert probe.deaths == []
        await probe.client.close()

    run_async(body)


def test_a_failure_while_steps_are_handled_is_a_death_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(steps: list[Step]) -> None:
        raise ZeroDivisionError("in the rolling batch")

    async def body() -> None:
        probe = Probe()
        probe.client._on_steps = fail
        await probe.start()
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        probe.submit(1, 1 << 30)
        assert "ZeroDivisionError: in the rolling batch" in await probe.death()
        await probe.client.close()

    asyncio.run(body())


def test_a_host_outlives_neither_its_server_nor_its_signals(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe()
        await probe.start()
        for number in (signal.SIGTERM, signal.SIGINT):  # these reach the whole process group
            os.kill(probe.client.pid, number)
        probe.submit(1, 2)
        await probe.until(lambda: any(delta.finish for delta in probe.deltas))
        probe.client._transport.abort()
        assert "exited with status 0" in await probe.death()
        await probe.client.close()

    run_async(body)
