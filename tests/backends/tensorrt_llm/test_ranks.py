from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm import ranks


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


class Ended(BaseException):
    """This process would have ended."""


class Steps:
    """An event that is never set; between looks one step is taken, and after the last it is over."""

    def __init__(self, *steps: Callable[[], object]) -> None:
        self.left = list(steps)
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        if not self.left:
            return True
        self.left.pop(0)()
        return False

    def is_set(self) -> bool:
        return False


def nothing() -> None:
    pass


@pytest.fixture
def below(monkeypatch: pytest.MonkeyPatch) -> list[Process]:
    """The processes below this one, whose end is an exception."""
    processes: list[Process] = []

    def children(*, recursive: bool) -> list[Process]:
        assert recursive
        return list(processes)

    def end(status: int) -> None:
        assert status == 3
        raise Ended

    fake = SimpleNamespace(
        Process=lambda: SimpleNamespace(children=children),
        Error=psutil.Error,
        STATUS_ZOMBIE=psutil.STATUS_ZOMBIE,
    )
    monkeypatch.setattr(ranks, "psutil", fake)
    monkeypatch.setattr(ranks, "os", SimpleNamespace(_exit=end))
    return processes


def watch(*steps: Callable[[], object]) -> Steps:
    over: Any = Steps(*steps)
    ranks._watch(over)
    return over  # type: ignore[no-any-return]


@pytest.mark.parametrize("command", [("python", "-m", "mpi4py.futures.server"), ("/opt/tensorrt_llm/worker",)])
@pytest.mark.parametrize("state", [psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED])
def test_a_rank_that_ends_ends_this_process(
    below: list[Process], capsys: pytest.CaptureFixture[str], command: tuple[str, ...], state: str
) -> None:
    below += [Process(7, *command), Process(8, *command)]
    with pytest.raises(Ended):
        watch(nothing, lambda: setattr(below[0], "state", state))
    assert capsys.readouterr().out == f"{ranks.DIED} (process 7)\n"


def test_a_rank_that_is_gone_ends_this_process(below: list[Process]) -> None:
    below.append(Process(7, "mpi4py"))
    with pytest.raises(Ended):
        watch(nothing, below.clear)


def test_ranks_that_live_are_left_alone(below: list[Process], capsys: pytest.CaptureFixture[str]) -> None:
    below.append(Process(7, "mpi4py"))
    steps = watch(nothing, lambda: below.append(Process(8, "mpi4py")), nothing)
    assert steps.waits == [0.2] * 4
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", [("orted",), ()])
def test_other_processes_may_end(below: list[Process], command: tuple[str, ...]) -> None:
    below.append(Process(7, *command))
    watch(nothing, below.clear, nothing)


def test_a_rank_that_ends_after_the_work_is_no_loss(below: list[Process], capsys: pytest.CaptureFixture[str]) -> None:
    below.append(Process(7, "mpi4py"))
    over: Any = Steps(nothing, below.clear)
    over.is_set = lambda: True
    ranks._watch(over)
    assert capsys.readouterr().out == ""


_PROGRAM = """
import subprocess, sys, time
from djl_trtllm.backends.tensorrt_llm.ranks import ending_with_ranks
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # mpi4py"])
if sys.argv[1] == "after":
    with ending_with_ranks():
        pass
    rank.kill()
    rank.wait()
    time.sleep(0.5)
    sys.exit(0)
with ending_with_ranks():
    time.sleep(0.5)
    rank.kill()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("when", "status", "said"), [("within", 3, ranks.DIED), ("after", 0, "")])
def test_a_real_rank_counts_inside_the_block_only(when: str, status: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, when],
        env={"PYTHONPATH": str(Path(__file__).parents[3])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout.split(" (process")[0]) == (status, said), done.stderr


def test_the_watch_ends_with_the_block(below: list[Process]) -> None:
    with ranks.ending_with_ranks():
        (thread,) = (thread for thread in threading.enumerate() if thread.name == "rank-watch")
        assert thread.daemon
    thread.join(300)
    assert not thread.is_alive()
