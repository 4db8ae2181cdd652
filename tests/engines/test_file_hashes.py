from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.engines import file_hashes
from djl_trtllm.engines.file_hashes import FileHashes


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


@pytest.mark.parametrize(("age", "remembered"), [(2.0, False), (2.001, True)])
def test_a_file_is_settled_after_two_seconds(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch, age: float, remembered: bool
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    os.utime(path, (1000, 1000))
    monkeypatch.setattr(file_hashes, "time", SimpleNamespace(time=lambda: 1000 + age))
    FileHashes(tmp_path / "store").sha256(path)
    assert (tmp_path / "store").exists() is remembered


@pytest.mark.parametrize(("size", "remembered"), [((64 << 20) - 1, False), (64 << 20, True)])
def test_files_of_64_mebibytes_are_worth_remembering(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, remembered: bool
) -> None:
    monkeypatch.setattr(file_hashes, "file_sha256", lambda path: "0" * 64)
    path = written(tmp_path / "weights", b"")
    os.truncate(path, size)
    os.utime(path, (1000, 1000))
    assert FileHashes(tmp_path / "store").sha256(path) == "0" * 64
    assert (tmp_path / "store").exists() is remembered


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "weights", b"one")
    original = file_hashes.file_sha256

    def changed(path: Path) -> str:
        sha256 = original(path)
        written(path, b"two and more")
        return sha256

    with monkeypatch.context() as patch:
        patch.setattr(file_hashes, "file_sha256", changed)
        assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"one")
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"two and more")


def test_files_are_remembered_beside_one_another(tmp_path: Path, reads: list[Path]) -> None:
    hashes = FileHashes(tmp_path / "not" / "there" / "yet")
    paths = [written(tmp_path / name, name.encode()) for name in ("one", "two")]
    for _ in range(2):
        assert [hashes.sha256(path) for path in paths] == [sha256(b"one"), sha256(b"two")]
    assert reads == paths
    assert len(list((tmp_path / "not" / "there" / "yet").iterdir())) == 2


def test_a_large_file_is_hashed_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_hashes, "_CHUNK_BYTES", 100)
    for size in (0, 99, 100, 101, 1000):
        path = written(tmp_path / "weights", bytes(range(250)) * 4)
        os.truncate(path, size)
        assert file_hashes.file_sha256(path) == sha256((bytes(range(250)) * 4)[:size])


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
    assert "cannot cache the hash of a large file, it is computed at every start" in caplog.text


def test_small_files_are_not_remembered(tmp_path: Path) -> None:
    path = written(tmp_path / "weights", b"one")
    assert FileHashes(tmp_path / "store").sha256(path) == sha256(b"one")
    assert not (tmp_path / "store").exists()
