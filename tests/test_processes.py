"""Signals and limits of processes, each rule tried in one of its own."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from djl_trtllm import processes
from djl_trtllm.processes import compiler_below, end_group, oom_kills, raise_limit

BEGIN = """
import resource, signal
from djl_trtllm.processes import allow_more_memory, leave_end_to_parent, write_no_core_file
"""
MIB = 1024**2


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", BEGIN + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_signals_of_a_terminal_are_left_to_the_parent() -> None:
    program = """
leave_end_to_parent()
for number in signal.SIGINT, signal.SIGTERM:
    signal.raise_signal(number)
print("goes on")
"""
    assert printed(program) == "goes on"


@pytest.mark.skipif(sys.platform != "linux", reason="what the kernel does at a parent's end")
def test_the_kernel_ends_it_with_its_parent() -> None:
    program = """
import ctypes
leave_end_to_parent()
of_parent = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(of_parent))  # PR_GET_PDEATHSIG
print(signal.Signals(of_parent.value).name)
"""
    assert printed(program) == "SIGKILL"


def test_a_crash_writes_no_core_file() -> None:
    assert printed("write_no_core_file(); print(resource.getrlimit(resource.RLIMIT_CORE))") == "(0, 0)"


@pytest.mark.parametrize(("asked", "outcome"), [(64, "taken"), (512, "MemoryError")])
def test_a_process_has_what_it_took_before_and_the_memory_that_is_allowed(asked: int, outcome: str) -> None:
    program = f"""
before = b"x" * {512 * MIB}
allow_more_memory({256 * MIB})
try:
    more = bytes({asked * MIB})
    print("taken")
except MemoryError as error:
    print("MemoryError")
limits = resource.getrlimit(resource.RLIMIT_AS)
assert limits[0] == limits[1]
"""
    assert printed(program) == outcome


def test_a_compiler_that_runs_below_this_process_is_found_until_it_ends(tmp_path: Path) -> None:
    script = tmp_path / "nvcc"
    script.write_text("#!/bin/sh\necho begun; read line")
    script.chmod(0o755)
    assert compiler_below() is None
    with subprocess.Popen([script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as compiler:
        assert compiler.stdout is not None and compiler.stdout.readline() == b"begun\n"
        assert compiler_below() == f"nvcc (process {compiler.pid})"
        compiler.kill()
        os.waitid(os.P_PID, compiler.pid, os.WEXITED | os.WNOWAIT)
        assert compiler_below() is None, "it has ended and nobody has waited for it"


# -- The limit of file descriptors --


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "given", "result"),
    [
        (1024, 4096, 1024, [], 1024),
        (1024, 4096, 1025, [(1025, 4096)], 1025),
        (1024, 4096, 9000, [(4096, 4096)], 4096),
        (1024, 1024, 9000, [], 1024),
    ],
)
def test_the_limit_is_raised_as_far_as_it_is_needed_and_may_be(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, needed: int, given: list[tuple[int, int]], result: int
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, wanted: limits.append(wanted))
    assert raise_limit(needed) == result
    assert limits == given


def test_a_group_ends_also_where_an_interrupt_ends_the_wait_for_it() -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.get_ident(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            end_group(process, 600)
    assert process.returncode == -signal.SIGKILL


def test_the_control_group_counts_its_own_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "cgroup" / "X:a" / "b"
    own.mkdir(parents=True)
    (tmp_path / "membership").write_text("4:memory:/other\n0::/X:a/b\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 40\n")
    for name in ("cgroup", "vmstat", "membership"):
        monkeypatch.setattr(processes, name.upper(), tmp_path / name)
    assert oom_kills() == 40
    (tmp_path / "cgroup" / "memory.events").write_text("low 0\noom 9\noom_kill 3\n")
    assert oom_kills() == 3
    (own / "memory.events").write_text("oom_kill 2\noom_group_kill 0\n")
    assert oom_kills() == 2
    # Where the kernel does not say, there are none.
    (tmp_path / "vmstat").write_text("oom_kill many\n")
    monkeypatch.setattr(processes, "MEMBERSHIP", tmp_path / "none")
    assert oom_kills() == 0
    monkeypatch.setattr(processes, "VMSTAT", tmp_path / "none")
    assert oom_kills() == 0


def test_all_processes_below_are_killed_with_those_that_they_start_but_the_spared() -> None:
    program = """
import subprocess, sys
from djl_trtllm.processes import adopting_orphans, below, kill_below
spared = subprocess.Popen(["sleep", "60"])
before = below()
with adopting_orphans():
    shell = subprocess.Popen(["sh", "-c", "sleep 61 & echo; exec sleep 62"], stdout=subprocess.PIPE)
    shell.stdout.readline()
    names = kill_below(before, 30)
    print(sorted(name.split()[0] for name in names), below() == before, spared.poll())
spared.kill()
"""
    assert printed(program) == "['sleep', 'sleep'] True None"
