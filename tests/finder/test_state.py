"""The file that an interrupted measurement goes on from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.state import Attempt, State, StateFile

CONDITIONS = {"model": "m", "options": {"dtype": "float16"}}
ATTEMPTS = [Attempt(100, True, "requests", "", 1.5), Attempt(200, False, "load", "no room", 2.5)]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    file = StateFile(tmp_path / "sizes", CONDITIONS)
    with file.held():
        assert file.read() == State(conditions=CONDITIONS)
        file.write(State(CONDITIONS, 5, ATTEMPTS))
        assert StateFile(tmp_path / "sizes", CONDITIONS).read() == State(CONDITIONS, 5, ATTEMPTS)
        file.forget()
        assert file.read().attempts == []
        file.forget()


@pytest.mark.parametrize("other", [{"model": "n"}, {"model": "m", "options": {"dtype": "bfloat16"}}, {}])
def test_other_conditions_have_another_file(tmp_path: Path, other: dict[str, object]) -> None:
    assert StateFile(tmp_path, other).path != StateFile(tmp_path, CONDITIONS).path
    assert StateFile(tmp_path, dict(reversed(CONDITIONS.items()))).path == StateFile(tmp_path, CONDITIONS).path


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"conditions": {}, "attempts": [1]}', b'{"conditions":{},"format":99}']
)
def test_a_file_that_is_no_state_is_as_none(tmp_path: Path, content: bytes) -> None:
    file = StateFile(tmp_path, CONDITIONS)
    file.path.write_bytes(content)
    assert file.read() == State(conditions=CONDITIONS)


def test_a_write_that_fails_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path, CONDITIONS)
    file.write(State(CONDITIONS, 5, ATTEMPTS[:1]))

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DjlTrtllmError, match=r"disk full; set option\.engine_cache_dir"):
        file.write(State(CONDITIONS, 5, ATTEMPTS))
    assert file.read().attempts == ATTEMPTS[:1]
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_a_process_at_a_time_measures_the_same(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from djl_trtllm.finder.state import StateFile\n"
        f"with StateFile(Path({str(tmp_path)!r}), {CONDITIONS!r}).held(): pass"
    )
    with StateFile(tmp_path, CONDITIONS).held():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "another process measures the same model" in done.stderr
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


def test_a_folder_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DjlTrtllmError, match="cannot be written"), StateFile(tmp_path / "file", CONDITIONS).held():
        pass


def test_the_log_is_beside_the_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path, CONDITIONS)
    assert file.log_path.parent == tmp_path and file.log_path.suffix == ".log"


def test_folders_are_made_and_the_file_is_written_where_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only within a folder is a file replaced as a whole.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    file = StateFile(tmp_path / "a" / "b", CONDITIONS)
    with file.held():
        file.write(State(CONDITIONS, 5, ATTEMPTS))
    assert file.read().attempts == ATTEMPTS
