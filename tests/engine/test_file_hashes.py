from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from djl_trtllm.engine import file_hashes
from djl_trtllm.engine.file_hashes import FileHashes


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were read, with every file counting as large."""
    files: list[Path] = []
    original = file_hashes.file_sha256

    def counted(path: Path) -> str:
        files.append(path)
        return original(path)

    monkeypatch.setattr(file_hashes, "file_sha256", counted)
    monkeypatch.setattr(file_hashes, "_WORTH_REMEMBERING_BYTES", 0)
    return files


def written(path: Path, content: bytes, *, age: float = 100) -> Path:
    path.write_bytes(content)
    modified = path.stat().st_mtime - age
    os.utime(path, (modified, modified))
    return path


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_an_unchanged_file_is_read_once(tmp_path: Path, reads: list[Path]) -> None:
    path = written(tmp_path / "weights", b"one")
    for _ in range(2):
        assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"one")
    assert reads == [path]


def test_a_changed_file_of_the_same_size_and_time_is_read_again(tmp_path: Path, reads: list[Path]) -> None:
    path = written(tmp_path / "weights", b"one")
    stat = path.stat()
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"one")
    path.write_bytes(b"two")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"two")


def test_a_file_touched_just_now_is_not_remembered(tmp_path: Path, reads: list[Path]) -> None:
    path = written(tmp_path / "weights", b"one", age=0)
    for _ in range(2):
        FileHashes(tmp_path / "store").sha256(path)
    assert len(reads) == 2


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff"])
def test_a_broken_note_is_not_believed(tmp_path: Path, reads: list[Path], content: bytes) -> None:
    path = written(tmp_path / "weights", b"one")
    FileHashes(tmp_path / "store").sha256(path)
    (note,) = (tmp_path / "store").iterdir()
    note.write_bytes(content)
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"one")


def test_a_store_that_cannot_be_written_costs_time_only(
    tmp_path: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "weights", b"one")
    (tmp_path / "file").write_text("")
    caplog.set_level("INFO")
    assert FileHashes(tmp_path / "file" / "store").sha256(path) == sha256(b"one")
    assert "is not remembered, and is computed at every start" in caplog.text


def test_small_files_are_not_remembered(tmp_path: Path) -> None:
    path = written(tmp_path / "weights", b"one")
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"one")
    assert not (tmp_path / "store").exists()
