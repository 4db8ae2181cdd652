"""Opening what may be a directory or an archive, or one in the other."""

from __future__ import annotations

import fcntl
import lzma
import os
import shutil
import tarfile
import threading
import zlib
from pathlib import Path

import pytest

from djl_trtllm.errors import ArchiveError, LayoutError
from djl_trtllm.model import archive as archives
from djl_trtllm.model.archive import Bounds, is_archive, open_model
from tests.model.packing import FILES, contents, member, pack, pack_files


def test_a_directory_is_opened_as_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert open_model(model, tmp_path / "work") == model
    assert not (tmp_path / "work").exists()


def test_opening_twice_extracts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_files(tmp_path / "m.tar.gz", "model/")
    first = open_model(packed, tmp_path / "work")
    monkeypatch.setattr(archives, "extract", lambda *_, **__: pytest.fail("extracted again"))
    assert open_model(packed.rename(tmp_path / "other name"), tmp_path / "work") == first


def test_another_content_is_another_directory(tmp_path: Path) -> None:
    first = open_model(pack(tmp_path / "m.tar.gz", member("config.json", b"1")), tmp_path / "work")
    second = open_model(pack(tmp_path / "m.tar.gz", member("config.json", b"2")), tmp_path / "work")
    assert [(d / "config.json").read_bytes() for d in (first, second)] == [b"1", b"2"]


def test_opening_at_the_same_time_extracts_once(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", *(member(f"f{number}", os.urandom(100_000)) for number in range(20)))
    opened: list[Path] = []
    threads = [threading.Thread(target=lambda: opened.append(open_model(packed, tmp_path / "work"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4 and len(set(opened)) == 1
    assert len(contents(opened[0])) == 20


def test_bounds_count_for_what_is_opened(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="more than 1 members"):
        open_model(pack_files(tmp_path / "m.tar.gz"), tmp_path / "work", bounds=Bounds(members=1))


def test_an_extraction_that_does_not_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_files(tmp_path / "m.tar.gz")
    name = open_model(packed, tmp_path / "work").name
    monkeypatch.setattr(archives, "_LOCK_TIMEOUT", 0.01)
    with (tmp_path / "work" / f".{name}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ArchiveError, match=r"another process has been extracting it to .*; end that process"):
            open_model(packed, tmp_path / "work")


def test_what_a_killed_extraction_left_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    packed, work = pack_files(tmp_path / "m.tar.gz"), tmp_path / "work"
    with monkeypatch.context() as patch:
        patch.setattr(archives._Extraction, "run", killed)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            open_model(packed, work)
    assert len([path for path in work.iterdir() if path.is_dir()]) == 1
    directory = open_model(packed, work)
    assert contents(directory) == FILES
    assert [path for path in work.iterdir() if path.is_dir()] == [directory]


def test_what_cannot_be_cleaned_up_is_in_nobodys_way(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "m.tar.gz")
    directory = open_model(packed, tmp_path / "work")
    directory.with_name(f".{directory.name}.partial-x").touch()
    assert open_model(packed, tmp_path / "work") == directory


def test_a_directory_with_one_archive_or_folder_is_descended(tmp_path: Path) -> None:
    # SageMaker puts the unpacked model.tar.gz, or what was in it, at /opt/ml/model.
    outer, nested = tmp_path / "opt", tmp_path / "nested"
    outer.mkdir()
    pack_files(outer / "model.tar.gz", "model/")
    (outer / "._model.tar.gz").write_bytes(b"junk")
    (outer / "lost+found").mkdir()
    assert contents(open_model(outer, tmp_path / "work")) == FILES
    (nested / "a" / "b").mkdir(parents=True)
    (nested / "a" / "b" / "config.json").write_text("{}")
    assert open_model(nested, tmp_path / "work") == nested / "a" / "b"


@pytest.mark.parametrize("name", ["1", "tensorrt_llm"])
def test_folders_of_a_model_repository_are_not_descended(tmp_path: Path, name: str) -> None:
    (tmp_path / "repository" / name).mkdir(parents=True)
    (tmp_path / "repository" / name / ("config.pbtxt" if name == "tensorrt_llm" else "rank0.engine")).touch()
    assert open_model(tmp_path / "repository", tmp_path / "work") == tmp_path / "repository"


def test_folders_inside_folders_end(tmp_path: Path) -> None:
    deepest = tmp_path / "0/1a/2a/3a/4a/5a/6a/7a"
    (deepest / "8a").mkdir(parents=True)
    (deepest / "config.json").touch()
    assert open_model(tmp_path / "0", tmp_path / "work") == deepest
    (deepest / "config.json").rename(deepest / "8a" / "config.json")
    with pytest.raises(ArchiveError, match="more than 8 archives and folders inside one another"):
        open_model(tmp_path / "0", tmp_path / "work")


def test_a_directory_that_cannot_be_read_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(LayoutError, match=r"cannot read the model directory .*Permission denied"):
        open_model(tmp_path, tmp_path / "work")


def test_the_opened_path_errors_say_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no model at"):
        open_model(tmp_path / "missing", tmp_path / "work")
    (tmp_path / "text").write_text("just some text, and more of it")
    with pytest.raises(ArchiveError, match=r"is not a tar archive \(30 bytes, starts with b'just some text, '\)"):
        open_model(tmp_path / "text", tmp_path / "work")
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b\x08broken")
    with pytest.raises(ArchiveError, match="damaged or truncated"):
        open_model(tmp_path / "broken.tar.gz", tmp_path / "work")


def test_archives_inside_archives_end(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "level0.tar.gz")
    for level in range(1, 4):
        packed = pack(tmp_path / f"level{level}.tar.gz", member(packed.name, packed.read_bytes()))
    assert contents(open_model(packed, tmp_path / "work")) == FILES
    packed = pack(tmp_path / "level4.tar.gz", member(packed.name, packed.read_bytes()))
    with pytest.raises(ArchiveError, match="inside one another"):
        open_model(packed, tmp_path / "work")


def test_an_archive_is_known_by_content_or_by_name(tmp_path: Path) -> None:
    assert is_archive(pack_files(tmp_path / "whatever"))
    for name in ("m.tar", "m.tar.gz", "m.tgz", "m.tar.bz2", "m.tar.xz", "M.TAR.GZ"):
        (tmp_path / name).write_bytes(b"broken")
        assert is_archive(tmp_path / name), name
    (tmp_path / "readme.txt").write_text("text")
    assert not is_archive(tmp_path / "readme.txt")
    assert not is_archive(tmp_path)


@pytest.mark.parametrize("error", [OSError, EOFError, zlib.error, lzma.LZMAError])
def test_what_cannot_be_looked_into_is_no_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(path: Path) -> bool:
        raise error("damaged")

    (tmp_path / "weights").touch()
    monkeypatch.setattr(tarfile, "is_tarfile", fail)
    assert not is_archive(tmp_path / "weights")
