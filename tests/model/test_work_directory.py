from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from djl_trtllm.model import work_directory
from djl_trtllm.model.work_directory import TEMPORARY_PREFIX, is_abandoned, marked, temporary_directory

_HOLD = """
import sys
from pathlib import Path
from djl_trtllm.model.work_directory import marked
with marked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_directory_is_abandoned_when_its_process_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "held\n"
    assert not is_abandoned(tmp_path)
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert is_abandoned(tmp_path)


def test_a_directory_is_marked_inside_the_block_only(tmp_path: Path) -> None:
    with marked(tmp_path):
        assert not is_abandoned(tmp_path)
    assert is_abandoned(tmp_path)
    assert not is_abandoned(tmp_path / "not there")
    with temporary_directory() as path:
        assert Path(path).name.startswith(TEMPORARY_PREFIX) and not is_abandoned(Path(path))
        (Path(path) / "file").touch()
    assert not Path(path).exists()


def aged(path: Path) -> Path:
    path.mkdir()
    (path / "socket").write_text("")
    os.utime(path, (0, 0))
    return path


@pytest.mark.parametrize("in_memory", [False, True])
def test_what_a_killed_server_left_is_swept_and_nothing_else(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    places = [tmp_path, tmp_path_factory.mktemp("empty")]
    disk, memory = reversed(places) if in_memory else places
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    monkeypatch.setattr(work_directory, "_SHARED_MEMORY", memory)
    swept = [aged(tmp_path / name) for name in ("djl-trtllm-0123456789ab", "djl-trtllm-work-x")]
    held = aged(tmp_path / "djl-trtllm-ba9876543210")
    kept = [aged(tmp_path / name) for name in ("djl-trtllm-cache", "other", "djl-trtllm-0123456789abc")]
    new = tmp_path / "djl-trtllm-00000000000a"
    new.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: held.stat().st_uid + 1)
        assert work_directory.sweep_temporary_directories() == 0  # they are another user's
    with marked(held):
        assert work_directory.sweep_temporary_directories() == 2
    assert set(tmp_path.iterdir()) == {held, new, *kept}
    assert not any(path.exists() for path in swept)
    assert work_directory.sweep_temporary_directories() == 1
