"""A client with a host that is a real process, on the server's event loop and on asyncio's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.scripted.executor import ScriptedExecutor
from djl_trtllm.executor import client
from djl_trtllm.executor.client import ProcessEnvironment
from djl_trtllm.executor.protocol import Step
from djl_trtllm.model.work_directory import folder_in_memory, is_abandoned
from djl_trtllm.request import FinishReason
from tests.executor.kit import Probe, has_ended, run_checked
from tests.support.processes import wait_until

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
@pytest.mark.parametrize("after", [0.0, 0.001, 0.5])
def test_a_cancelled_start_leaves_nothing(run_async: Runner, after: float) -> None:
    async def body() -> None:
        start = asyncio.ensure_future(Probe().start(start_seconds=60))
        await asyncio.sleep(after)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start

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


class Forking(ScriptedExecutor):
    """Its process has a child and a grandchild that were forked and that outlive it, as vLLM's ranks may."""

    def __init__(self) -> None:
        super().__init__()
        if os.fork() == 0:
            os.fork()
            time.sleep(600)


def test_the_end_of_an_engine_process_is_seen_though_what_it_forked_lives_on(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe(hang_timeout=FOR_EVER)
        await probe.start(f"{__name__}:{Forking.__name__}")
        child = psutil.Process(probe.client.pid).children()[0]
        family = [child, *child.children(), psutil.Process(probe.client.pid)]
        resident = sum(process.memory_info().rss for process in family)
        assert len(family) == 3 and probe.client.resident_bytes() == pytest.approx(resident, rel=0.1)
        psutil.Process(probe.client.pid).kill()
        assert "it was killed by SIGKILL" in await probe.death()
        assert has_ended(child) and await probe.client.measure_memory() == 0
        await probe.client.close()

    run_async(body)


class Hanging(ScriptedExecutor):
    """An iteration of it hangs, as one of vLLM's does that waits for a rank which has ended."""

    def step(self) -> Step:
        time.sleep(600)
        raise AssertionError

    def check(self) -> None:
        if self.busy:
            raise RuntimeError("a rank is gone")


def test_an_engine_is_checked_while_an_iteration_of_it_hangs(run_async: Runner) -> None:
    async def body() -> None:
        probe = Probe(hang_timeout=FOR_EVER)
        await probe.start(f"{__name__}:{Hanging.__name__}")
        probe.submit(1, 2)
        assert "a rank is gone" in await probe.death()
        await probe.client.close()

    run_async(body)


# -- what it leaves behind ---------------------------------------------------------------------------------------------

FAMILY = "DJL_TRTLLM_TEST_FAMILY"
ORPHAN = """
import subprocess
quiet = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=quiet, stderr=quiet).pid)
"""
TEMPORARY = "import tempfile; print(tempfile.mkdtemp(), end='')"


@pytest.fixture(autouse=True)
def family(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Only what a test has started is looked at, so that wrong code under test kills nothing else."""
    own, everybody = secrets.token_hex(16), psutil.process_iter

    def relatives() -> Iterator[psutil.Process]:
        for process in everybody():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(FAMILY) == own:
                    yield process

    monkeypatch.setenv(FAMILY, own)
    monkeypatch.setattr(psutil, "process_iter", relatives)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    for process in list(relatives()):
        process.kill()


class Machine:
    """Processes that are played, and a clock that only waiting moves. `crowds` are what looking shows, one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.host = ProcessEnvironment()
        self.crowds: list[list[Any]] = []
        self.killed: list[int] = []
        monkeypatch.setattr(
            psutil, "process_iter", lambda: self.crowds.pop(0) if len(self.crowds) > 1 else self.crowds[0]
        )
        monkeypatch.setattr(psutil, "wait_procs", self._wait)
        monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: self.now))

    def process(
        self, pid: int, *, status: str = psutil.STATUS_SLEEPING, hidden: Exception | None = None, gone: bool = False
    ) -> Any:
        """A process with the host's mark, which cannot be asked, or is gone when it is to be killed."""

        def environ() -> dict[str, str]:
            if hidden is not None:
                raise hidden
            return self.host.variables

        def kill() -> None:
            self.killed.append(pid)
            if gone:
                raise psutil.NoSuchProcess(pid)

        return SimpleNamespace(pid=pid, environ=environ, status=lambda: status, kill=kill)

    def _wait(self, processes: list[Any], timeout: float) -> None:
        self.now += min(timeout, 0.75)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# -- processes ---------------------------------------------------------------------------------------------------------


def test_what_a_marked_process_left_is_killed_whatever_its_parent_and_session() -> None:
    host = ProcessEnvironment()
    done = subprocess.run([sys.executable, "-c", ORPHAN], env=host.variables, capture_output=True, check=True)
    orphan = psutil.Process(int(done.stdout))
    # It has none for a moment, while it becomes another program.
    wait_until(lambda: host.variables.items() <= orphan.environ().items())
    assert host.clear() == [orphan.pid]
    assert has_ended(orphan)
    assert host.clear() == []


def test_processes_with_another_mark_are_left_alone() -> None:
    process = subprocess.Popen(["sleep", "600"], env=ProcessEnvironment().variables)
    try:
        assert ProcessEnvironment().clear() == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_what_a_process_started_before_it_was_killed_is_killed_too(machine: Machine) -> None:
    first, second = machine.process(70), machine.process(7)
    machine.crowds = [[first], [second], []]
    assert (machine.host.clear(), machine.killed) == ([7, 70], [70, 7])


def test_one_that_does_not_end_is_waited_for_a_second_at_most(machine: Machine) -> None:
    machine.crowds = [[machine.process(7)]]
    assert (machine.host.clear(), machine.now) == ([7], 1001.0)


def test_the_dead_and_those_that_may_not_be_asked_are_passed_over(machine: Machine) -> None:
    hidden = [machine.process(1, hidden=psutil.AccessDenied(1)), machine.process(2, hidden=ProcessLookupError())]
    zombie = machine.process(3, status=psutil.STATUS_ZOMBIE)
    machine.crowds = [[*hidden, zombie, machine.process(4, gone=True), machine.process(5)], []]
    assert machine.host.clear() == machine.killed == [4, 5]


# -- files -------------------------------------------------------------------------------------------------------------


def test_temporary_files_go_to_a_folder_that_is_removed(tmp_path: Path) -> None:
    host = ProcessEnvironment()
    host.prepare()
    assert stat.S_IMODE(host.temporary.stat().st_mode) == 0o700
    made = subprocess.run([sys.executable, "-c", TEMPORARY], env=host.variables, capture_output=True, check=True)
    folder = Path(made.stdout.decode())
    assert folder.is_dir() and folder.parent.parent == tmp_path
    memory = folder_in_memory(host.temporary)
    assert stat.S_IMODE(memory.stat().st_mode) == 0o700
    assert not is_abandoned(memory)
    (memory / "segment").touch()
    host.clear()
    assert list(tmp_path.iterdir()) == []
    assert not memory.exists()
