"""Files that are refused by their kind and size."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from djl_trtllm.files import read_file, write_whole
from tests.support.tables import by_rows


def _write(path: Path) -> None:
    path.write_bytes(b"abcd")


KINDS: dict[str, Callable[[Path], None]] = {
    "a directory": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "more than 3 bytes": lambda path: _write(path),
    "symbolic links": lambda path: path.symlink_to(path),
}


@by_rows("kind", KINDS)
def test_what_is_no_such_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    KINDS[kind](path)
    with pytest.raises(OSError, match=kind) as caught:
        read_file(path, 3)
    assert caught.value.filename == str(path)


def test_a_file_may_have_as_many_bytes_as_its_kind(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_file(tmp_path / "file", 3) == b"abc"


def test_a_file_is_replaced_when_the_new_one_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")
    synced: list[tuple[int, bytes]] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_size, (tmp_path / "file").read_bytes()))
    )
    write_whole(tmp_path / "file", b"newer")
    assert (synced, (tmp_path / "file").read_bytes()) == ([(5, b"old")], b"newer")


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="file"):
        write_whole(tmp_path / "file", b"abc")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
