from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_temporary_directory_is_marked_and_removed() -> None:
    with temporary_directory() as path:
        assert Path(path).name.startswith(TEMPORARY_PREFIX)
        assert not is_abandoned(Path(path))
        (Path(path) / "file").touch()
    assert not Path(path).exists()
