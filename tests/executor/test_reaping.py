from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from djl_trtllm.executor.reaping import HostEnvironment
from djl_trtllm.executor.workers import Workers

ORPHAN = """
import subprocess
quiet = subprocess.DEVNULL
print(subprocess.Popen(["sleep", "60"], start_new_session=True, stdout=quiet, stderr=quiet).pid)
"""
TEMPORARY = "import tempfile; print(tempfile.mkdtemp(), end='')"
RANK = "import time; print('ready', flush=True); time.sleep(60)  # mpi4py"


def is_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.01)
    return False


def test_what_a_marked_process_left_is_killed_whatever_its_parent_and_session() -> None:
    host = HostEnvironment()
    done = subprocess.run([sys.executable, "-c", ORPHAN], env=host.variables, capture_output=True, check=True)
    pid = int(done.stdout)
    assert psutil.Process(pid).ppid() != os.getpid()
    assert host.clear() == [pid]
    assert is_gone(pid)
    assert host.clear() == []


def test_processes_with_another_mark_are_left_alone() -> None:
    process = subprocess.Popen(["sleep", "60"], env=HostEnvironment().variables)
    try:
        assert HostEnvironment().clear() == []
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_temporary_files_go_to_a_folder_that_is_removed_and_compiled_kernels_do_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    host = HostEnvironment()
    host.prepare()
    made = subprocess.run([sys.executable, "-c", TEMPORARY], env=host.variables, capture_output=True, check=True)
    folder = Path(made.stdout.decode())
    assert folder.is_dir() and folder.parent.parent == tmp_path
    assert Path(host.variables["TORCHINDUCTOR_CACHE_DIR"]).parent == tmp_path
    host.clear()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def rank() -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    return process


def test_ranks_are_known_by_their_command_and_missed_when_they_end(rank: subprocess.Popen[bytes]) -> None:
    bystander = subprocess.Popen(["sleep", "60"])
    workers = Workers.of_this_process()
    assert len(workers) == 1
    assert workers.dead() == []
    bystander.kill()
    bystander.wait()
    assert workers.dead() == []
    rank.kill()
    # A zombie is dead as well.
    assert is_gone(rank.pid)
    assert workers.dead() == [rank.pid]
    rank.wait()
    assert workers.dead() == [rank.pid]
