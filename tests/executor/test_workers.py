"""The processes of TensorRT-LLM's ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from djl_trtllm.executor.workers import Workers

WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"


def started(mark: str) -> subprocess.Popen[bytes]:
    """A process with a mark in its command line, waiting for the end of its input."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"{WAITS}  # {mark}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One rank of each kind, and another process."""
    made = [started(mark) for mark in ("mpi4py", "tensorrt_llm", "nvcc")]
    yield made
    for process in made:
        process.kill()
        process.communicate()


def test_ranks_are_known_by_their_command_and_missed_when_they_end(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    one, other, bystander = processes
    workers = Workers.of_this_process()
    assert len(workers) == 2
    bystander.kill()
    bystander.wait()
    assert workers.dead() == []
    one.kill()
    psutil.Process(one.pid).wait(20)
    assert workers.dead() == [one.pid]
    other.kill()
    other.wait()
    assert sorted(workers.dead()) == sorted([one.pid, other.pid])


class Process:
    """Stands for a process."""

    def __init__(self, pid: int, *, running: bool = True, status: str = psutil.STATUS_SLEEPING) -> None:
        self.pid = pid
        self._running = running
        self._status = status

    def is_running(self) -> bool:
        return self._running

    def status(self) -> str:
        return self._status


class Gone(Process):
    def status(self) -> str:
        raise psutil.NoSuchProcess(self.pid)

    def cmdline(self) -> list[str]:
        raise psutil.NoSuchProcess(self.pid)


def test_a_zombie_is_dead_and_one_that_cannot_be_asked_too() -> None:
    crowd = [Process(1), Process(2, running=False), Process(3, status=psutil.STATUS_ZOMBIE), Gone(4)]
    assert Workers(crowd).dead() == [2, 3, 4]


def test_a_process_that_ends_while_it_is_looked_at_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Own:
        def children(self, recursive: bool = False) -> list[Process]:
            asked.append(recursive)
            return [Gone(1)]

    monkeypatch.setattr(psutil, "Process", Own)
    assert len(Workers.of_this_process()) == 0
    assert asked == [True]  # ranks are below a launcher that is below this process


def test_without_workers_none_is_dead() -> None:
    assert Workers([]).dead() == []
