from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.model.remote.parts import PartialFile

CONTENT = b"0123456789"


def file_of(path: Path, size: int = 10, etag: str = "e", part_size: int = 4) -> PartialFile:
    return PartialFile(path, size, etag, part_size)


def bring(file: PartialFile, *indices: int) -> list[bool]:
    """Write and note parts; what noting each said."""
    said = []
    for index in indices:
        start, end = file.part(index)
        file.write(start, CONTENT[start:end])
        said.append(file.note(index, 100 + index))
    return said


def open_files(path: Path | str) -> int:
    """How many descriptors of this process are of a file."""
    return sum(os.path.realpath(entry) == str(path) for entry in Path("/proc/self/fd").iterdir())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "below" / "model.bin"


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir()) if path.parent.exists() else []


def test_a_file_arrives_in_parts_in_any_order(path: Path) -> None:
    file = file_of(path)
    assert (file.parts, file.missing(), file.missing_bytes) == (3, [0, 1, 2], 10)
    assert [file.part(index) for index in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert names(path) == []
    assert bring(file, 2, 0) == [False, False]
    assert (file.missing(), file.missing_bytes, file.complete) == ([1], 4, False)
    assert bring(file, 1) == [True]
    assert list(file.crcs()) == [(100, 4), (101, 4), (102, 2)]
    assert names(path) == ["model.bin.arriving", "model.bin.parts"]
    with path.with_name("model.bin.arriving").open("rb") as arriving:
        assert open_files(arriving.name) == 2
        file.finish()
    assert open_files(path) == 0
    assert path.read_bytes() == CONTENT
    assert names(path) == ["model.bin"]
    assert (file.complete, file.missing(), file.missing_bytes, file.missing_blocks) == (True, [], 0, 0)


def test_it_goes_on_where_it_stopped(path: Path) -> None:
    bring(file_of(path), 0, 2)
    file = file_of(path)
    assert file.missing() == [1]
    assert bring(file, 1) == [True]
    assert list(file.crcs()) == [(100, 4), (101, 4), (102, 2)]
    file.finish()
    assert path.read_bytes() == CONTENT


def test_a_line_that_was_being_written_is_no_part(path: Path) -> None:
    bring(file_of(path), 0, 2)
    journal = path.with_name("model.bin.parts")
    journal.write_bytes(journal.read_bytes()[:-1])
    assert file_of(path).missing() == [1, 2]


@pytest.mark.parametrize(
    "other", [{"size": 9}, {"etag": "f"}, {"part_size": 5}], ids=["another size", "another content", "other parts"]
)
def test_parts_of_something_else_are_started_anew(path: Path, other: dict[str, int | str]) -> None:
    bring(file_of(path), 0, 2)
    file = PartialFile(**({"path": path, "size": 10, "etag": "e", "part_size": 4} | other))  # type: ignore[arg-type]
    assert len(file.missing()) == file.parts
    assert names(path) == []


@pytest.mark.parametrize("journal", [b"", b"{", b"[]\n", b'{"size":10,"etag":"e","part_size":4}\n["0",1]\n'])
def test_a_damaged_journal_is_not_believed(path: Path, journal: bytes) -> None:
    bring(file_of(path), 0, 2)
    path.with_name("model.bin.parts").write_bytes(journal)
    assert file_of(path).missing() == [0, 1, 2]
    assert names(path) == []


def test_a_file_without_its_journal_is_started_anew(path: Path) -> None:
    bring(file_of(path), 0)
    path.with_name("model.bin.parts").unlink()
    assert file_of(path).missing() == [0, 1, 2]
    assert names(path) == []


def test_a_journal_without_its_file_is_started_anew(path: Path) -> None:
    bring(file_of(path), 0)
    path.with_name("model.bin.arriving").unlink()
    assert file_of(path).missing() == [0, 1, 2]
    assert names(path) == []


def test_what_is_discarded_is_gone(path: Path) -> None:
    file = file_of(path)
    bring(file, 0, 1, 2)
    file.discard()
    assert (names(path), file.missing()) == ([], [0, 1, 2])
    assert bring(file, 0, 1, 2) == [False, False, True]
    file.finish()
    assert path.read_bytes() == CONTENT


def test_others_may_read_it(path: Path) -> None:
    mask = os.umask(0)
    try:
        file = file_of(path)
        bring(file, 0, 1, 2)
        file.finish()
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_journal_that_has_gone_is_no_matter(path: Path) -> None:
    for end in (PartialFile.discard, PartialFile.finish):
        file = file_of(path)
        bring(file, 0, 1, 2)
        path.with_name("model.bin.parts").unlink()
        end(file)
    assert names(path) == ["model.bin"]


def test_an_empty_file_has_no_parts(path: Path) -> None:
    file = file_of(path, size=0)
    assert (file.parts, file.missing(), file.missing_bytes) == (0, [], 0)
    file.finish()
    assert path.read_bytes() == b"" and names(path) == ["model.bin"]


def test_a_file_that_is_here_is_left_as_it_is(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(b"here")
    path.with_name("model.bin.arriving").touch()
    file = file_of(path)
    assert file.complete and file.missing() == [] and file.missing_blocks == 0
    assert names(path) == ["model.bin", "model.bin.arriving"]


def test_a_folder_of_that_name_is_no_file(path: Path) -> None:
    path.mkdir(parents=True)
    assert not file_of(path).complete


def test_the_disk_is_asked_for_all_of_it_at_once(path: Path) -> None:
    file = file_of(path, size=1_000_000, part_size=1000)
    assert file.missing_blocks == 1_000_000
    file.write(0, b"x")
    assert path.with_name("model.bin.arriving").stat().st_size == 1_000_000
    assert file.missing_blocks == 0


def test_what_the_disk_has_of_a_file_with_holes_counts_as_there(path: Path) -> None:
    file = file_of(path, size=1_000_000, part_size=1000)
    path.parent.mkdir(parents=True)
    with path.with_name("model.bin.arriving").open("wb") as holes:
        holes.truncate(1_000_000)
        holes.write(b"x" * 8192)
    blocks = path.with_name("model.bin.arriving").stat().st_blocks * 512
    assert 0 < blocks < 1_000_000
    assert file.missing_blocks == 1_000_000 - blocks


def test_a_full_disk_is_reported_before_anything_is_fetched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        assert (start, size) == (0, 10)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        file_of(path).write(0, b"x")


def test_a_system_that_writes_less_than_asked_is_asked_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, bytes(data)[:3], at))
    file = file_of(path)
    bring(file, 0, 1, 2)
    file.finish()
    assert path.read_bytes() == CONTENT


def test_one_descriptor_serves_until_it_is_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = [], []
    original = SimpleNamespace(open=os.open, close=os.close)

    def open_(*arguments: object) -> int:
        opened.append(descriptor := int(original.open(*arguments)))
        return descriptor

    def close(descriptor: int) -> None:
        closed.append(descriptor)
        original.close(descriptor)

    file = file_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_)
        patch.setattr(os, "close", close)
        bring(file, 0, 1)
        assert len(opened) == 1 and not closed
        file.close()
        file.close()
        assert closed == opened
        bring(file, 2)
        assert len(opened) == 2
    file.finish()
    assert path.read_bytes() == CONTENT
