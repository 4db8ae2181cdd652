"""What an engine process leaves behind."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from djl_trtllm.executor import reaping
from djl_trtllm.executor.reaping import ProcessEnvironment
from tests.executor.probe import has_ended
from tests.support.waiting import wait_until

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


class Process:
    """Stands for a process: `lives` kills are survived, 1000 by one that waits for its GPU."""

    def __init__(
        self, pid: int, host: ProcessEnvironment, *, lives: int = 0, status: str = psutil.STATUS_SLEEPING
    ) -> None:
        self.pid = pid
        self.lives = lives
        self._variables = host.variables
        self._status = status

    def environ(self) -> dict[str, str]:
        return self._variables

    def status(self) -> str:
        return self._status

    def kill(self) -> None:
        self.lives -= 1


class Machine:
    """Processes that are played, and a clock that only waiting moves. `process_iter` shows one crowd after another."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.crowds: list[Sequence[Process]] = []
        self.waits: list[float | None] = []
        self.look_seconds = 0.0
        monkeypatch.setattr(psutil, "process_iter", self._process_iter)
        monkeypatch.setattr(psutil, "wait_procs", self._wait_procs)
        monkeypatch.setattr(reaping, "time", SimpleNamespace(monotonic=lambda: self.now))

    def _process_iter(self) -> list[Process]:
        self.now += self.look_seconds
        crowd = self.crowds[0]
        if len(self.crowds) > 1:
            del self.crowds[0]
        return [process for process in crowd if process.lives >= 0]

    def _wait_procs(self, processes: Sequence[Process], timeout: float | None = None) -> None:
        self.waits.append(timeout)
        if any(process.lives >= 0 for process in processes):
            self.now += 0.75 if timeout is None else min(timeout, 0.75)


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
    assert orphan.ppid() != os.getpid()
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
    host = ProcessEnvironment()
    first, second = Process(70, host), Process(7, host)
    machine.crowds = [[first], [first, second], []]
    assert host.clear() == [7, 70]
    assert (first.lives, second.lives) == (-1, -1)


def test_one_that_does_not_end_is_waited_for_a_second_at_most(machine: Machine) -> None:
    host = ProcessEnvironment()
    machine.crowds = [[Process(7, host, lives=1000)]]
    assert host.clear() == [7]
    assert machine.now == 1001.0
    assert machine.waits == [1.0, 0.25]


def test_what_is_found_late_is_killed_all_the_same(machine: Machine) -> None:
    """On a busy machine with many processes, looking takes seconds."""
    host = ProcessEnvironment()
    process = Process(7, host)
    machine.look_seconds = 2.0
    machine.crowds = [[process], []]
    assert host.clear() == [7]
    assert process.lives == -1
    assert machine.waits == [0.0]


def test_no_time_is_left_where_looking_took_all_of_it(machine: Machine) -> None:
    host = ProcessEnvironment()

    class Slow(Process):
        def kill(self) -> None:
            machine.now += 5

    machine.crowds = [[Slow(7, host)]]
    assert host.clear() == [7]
    assert machine.waits == [0.0]


def test_the_dead_and_those_that_may_not_be_asked_are_passed_over(machine: Machine) -> None:
    host = ProcessEnvironment()

    class Foreign(Process):
        def environ(self) -> dict[str, str]:
            raise psutil.AccessDenied(self.pid)

    class Gone(Process):
        def environ(self) -> dict[str, str]:
            raise ProcessLookupError

    class Quick(Process):
        def kill(self) -> None:
            super().kill()
            raise psutil.NoSuchProcess(self.pid)

    zombie = Process(3, host, status=psutil.STATUS_ZOMBIE)
    machine.crowds = [[Foreign(1, host), Gone(2, host), zombie, Quick(4, host), Process(5, host)]]
    assert host.clear() == [4, 5]
    assert zombie.lives == 0


def test_each_engine_process_has_a_mark_of_its_own() -> None:
    one, other = ProcessEnvironment(), ProcessEnvironment()
    assert one.variables["DJL_TRTLLM_ENGINE_PROCESS"] != other.variables["DJL_TRTLLM_ENGINE_PROCESS"]
    assert one.temporary != other.temporary


# -- files -------------------------------------------------------------------------------------------------------------


def test_temporary_files_go_to_a_folder_that_is_removed_and_compiled_kernels_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    host = ProcessEnvironment()
    host.prepare()
    assert stat.S_IMODE(host.temporary.stat().st_mode) == 0o700
    made = subprocess.run([sys.executable, "-c", TEMPORARY], env=host.variables, capture_output=True, check=True)
    folder = Path(made.stdout.decode())
    assert folder.is_dir() and folder.parent.parent == tmp_path
    assert host.variables["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / f"torchinductor_{getpass.getuser()}")
    host.clear()
    assert list(tmp_path.iterdir()) == []


def test_the_operators_place_for_compiled_kernels_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kernels")
    assert ProcessEnvironment().variables["TORCHINDUCTOR_CACHE_DIR"] == "/kernels"


def test_a_user_id_without_a_name_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def nameless() -> str:
        raise KeyError("uid not found: 1234")

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(getpass, "getuser", nameless)
    assert "TORCHINDUCTOR_CACHE_DIR" not in ProcessEnvironment().variables


def test_the_folder_leaves_room_for_the_name_of_a_socket(tmp_path: Path) -> None:
    """The path of a socket has 107 bytes."""
    assert len(str(ProcessEnvironment().temporary)) - len(str(tmp_path)) <= 24


def test_a_folder_that_cannot_be_made_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    with pytest.raises(OSError, match="none"):
        ProcessEnvironment().prepare()


def test_without_a_folder_there_is_nothing_to_remove() -> None:
    assert ProcessEnvironment().clear() == []
