"""The processes of TensorRT-LLM's ranks."""

from __future__ import annotations

import subprocess
import sys
from typing import cast

import psutil
import pytest

from djl_trtllm.backends.tensorrt_llm.ranks import dead, ranks_below

WAITS = "import sys; print('ready', flush=True); sys.stdin.read()"


WATCHES = f"""
import subprocess, sys
from djl_trtllm.backends.tensorrt_llm.ranks import dead, ranks_below

def started(mark):
    command = [sys.executable, "-c", {WAITS!r} + f"  # {{mark}}"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process

def end(process):
    process.kill()
    process.wait()

one, other, bystander = map(started, ("mpi4py", "tensorrt_llm", "nvcc"))
ranks = ranks_below()
print(len(ranks))
end(bystander)
print(dead(ranks) == [])
end(one)
print(dead(ranks) == [one.pid])
end(other)
print(sorted(dead(ranks)) == sorted([one.pid, other.pid]))
"""
"""A process with one rank of each kind, and another process, below it."""


def test_ranks_are_known_by_their_command_and_missed_when_they_end() -> None:
    seen = subprocess.run([sys.executable, "-c", WATCHES], capture_output=True, text=True, check=True, timeout=120)
    assert seen.stdout.split() == ["2", "True", "True", "True"]


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
    assert dead(cast(list[psutil.Process], crowd)) == [2, 3, 4]


def test_a_process_that_ends_while_it_is_looked_at_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Own:
        def children(self, recursive: bool = False) -> list[Process]:
            asked.append(recursive)
            return [Gone(1)]

    monkeypatch.setattr(psutil, "Process", Own)
    assert len(ranks_below()) == 0
    assert asked == [True]  # ranks are below a launcher that is below this process


def test_without_ranks_none_is_dead() -> None:
    assert dead([]) == []
