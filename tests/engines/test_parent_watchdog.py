"""A process of its own for each test, because it ends by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from djl_trtllm.engines import parent_watchdog as lifeline
from tests.engines.helpers import wait_until

# The file alone: the package takes a second to import.
_PROGRAM = """
import runpy, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
runpy.run_path(sys.argv[1])["die_with_parent"]()
print(child.pid, flush=True)
time.sleep(600)
"""


class Started:
    """The program, and the child it started; standard input is what the parent holds."""

    def __init__(self, *, leads_a_group: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(lifeline.__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=leads_a_group,
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.child = int(self.stdout.readline())

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.stdout.close()
        with suppress(BrokenPipeError):
            self.stdin.close()


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def ends() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_compiler_whose_parent_is_gone_ends_with_all_it_started(ends: ExitStack) -> None:
    started = Started(leads_a_group=True)
    ends.callback(started.end)
    started.stdin.write(b"not the end yet")
    started.stdin.close()
    assert started.process.wait(300) == -signal.SIGKILL
    wait_until(lambda: not runs(started.child))


def test_one_that_leads_no_group_ends_alone(ends: ExitStack) -> None:
    started = Started(leads_a_group=False)
    ends.callback(started.end)
    started.stdin.close()
    assert started.process.wait(300) == 1
    assert runs(started.child)


def test_as_long_as_the_parent_is_there_it_lives(ends: ExitStack) -> None:
    started = Started(leads_a_group=True)
    ends.callback(started.end)
    started.stdin.write(b"x")
    started.stdin.flush()
    assert runs(started.child) and started.process.poll() is None


def test_a_process_that_is_done_does_not_wait_for_its_parent() -> None:
    program = "import runpy, sys, threading; runpy.run_path(sys.argv[1])['die_with_parent']()\n"
    program += "print([thread.name for thread in threading.enumerate()], flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(lifeline.__file__)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"['MainThread', 'parent-watch']\n"
        try:
            assert process.wait(300) == 0
        finally:
            process.kill()


def test_without_a_standard_input_there_is_no_parent() -> None:
    program = "import os, runpy, sys, time; os.close(0)\n"
    program += "runpy.run_path(sys.argv[1])['die_with_parent'](); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", program, str(lifeline.__file__)])
    try:
        assert process.wait(300) == 1
    finally:
        process.kill()
        process.wait()
