from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.errors import ArchiveError
from djl_trtllm.model import archive as archives
from djl_trtllm.model.archive import extract
from tests.model.packing import FILES, Member, contents, member, pack, pack_files, with_records


@pytest.mark.parametrize("prefix", ["", "./", "model/", "./model/", "anything else/", "a/b/"])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("model.tar.gz", "w:gz"), ("m.tgz", "w:gz"), ("m.tar", "w"), ("artifact", "w:xz"), ("other", "w:bz2")],
)
def test_with_or_without_a_top_folder_the_model_directory_is_returned(
    tmp_path: Path, prefix: str, name: str, mode: str
) -> None:
    directory = extract(pack_files(tmp_path / name, prefix, mode), tmp_path / "out")
    assert contents(directory) == FILES


def test_a_model_repository_keeps_its_own_folders(tmp_path: Path) -> None:
    packed = pack(
        tmp_path / "m.tar.gz", member("repo/tensorrt_llm/config.pbtxt"), member("repo/tensorrt_llm/1/rank0.engine")
    )
    assert [entry.name for entry in extract(packed, tmp_path / "out").iterdir()] == ["tensorrt_llm"]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (member("/etc/passwd"), "leads out"),
        (member("../outside"), "leads out"),
        (member("model/../../outside"), "leads out"),
        (member("a/.."), "leads out"),
        (member("link", kind=tarfile.SYMTYPE, link="/etc/passwd"), "it is a symbolic link to '/etc/passwd';"),
        (member("link", kind=tarfile.LNKTYPE, link="config.json"), "it is a hard link to 'config.json';"),
        (member("pipe", kind=tarfile.FIFOTYPE), "it is a named pipe;"),
        (member("disk", kind=tarfile.BLKTYPE), "it is a device;"),
        (member("null", kind=tarfile.CHRTYPE), "it is a device;"),
        (member("config.json"), "an earlier member has the same path"),
        (member("config.json/inside"), "a file and a directory have the same name"),
        (member("d/" * 32 + "file"), "its path is too long;"),
        (member("d/" + "f" * 256), "its path is too long;"),
        (with_records("nul", path="a\0b"), "leads out"),
    ],
)
def test_an_unsafe_member_is_refused_by_name_and_nothing_is_left(tmp_path: Path, bad: Member, says: str) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("config.json"), bad)
    with pytest.raises(ArchiveError, match=says) as caught:
        extract(packed, tmp_path / "work" / "out")
    assert str(packed) in str(caught.value)
    assert repr(bad[0].pax_headers.get("path", bad[0].name)[:200]) in str(caught.value)
    assert list((tmp_path / "work").iterdir()) == []


@pytest.mark.parametrize("name", ["d/" * 31 + "file", "d/" + "f" * 255])
def test_a_long_path_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    directory = extract(pack(tmp_path / "m.tar", member("config.json"), member(name), mode="w"), tmp_path / "out")
    assert (directory / name).read_bytes() == b"x"


def test_a_link_cannot_redirect_a_later_member(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    packed = pack(
        tmp_path / "m.tar.gz", member("dir", kind=tarfile.SYMTYPE, link=str(outside)), member("dir/file", b"owned")
    )
    with pytest.raises(ArchiveError):
        extract(packed, tmp_path / "out")
    assert list(outside.iterdir()) == []


_PARTS = st.one_of(
    st.sampled_from(
        ["..", ".", "", "/", "a", "model", "~", "\\", "C:", "._x", "config.json", "a" * 300, "\n", "é", "\udcff"]
    ),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8),
)
_KINDS = st.sampled_from(
    [tarfile.REGTYPE] * 6
    + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(
        st.tuples(
            st.lists(_PARTS, min_size=1, max_size=5),
            st.booleans(),
            _KINDS,
            st.sampled_from(["..", "/etc", "a", "../x"]),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_nothing_is_ever_written_outside(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[list[str], bool, bytes, str]]
) -> None:
    root = tmp_path_factory.mktemp("escape")
    packed = root / "m.tar"
    with tarfile.open(packed, "w", format=tarfile.PAX_FORMAT) as tar:
        for parts, absolute, kind, link in members:
            info, content = member(("/" if absolute else "") + "/".join(parts), b"x", kind, link)
            tar.addfile(info, io.BytesIO(content))
    work = root / "deep" / "work"
    before = {entry.name for entry in root.iterdir()} | {"deep"}
    try:
        extract(packed, work / "out")
    except ArchiveError:
        assert list(work.iterdir()) == []
    else:
        assert [entry.name for entry in work.iterdir()] == ["out"]
        assert not any(entry.is_symlink() or not (entry.is_dir() or entry.is_file()) for entry in work.rglob("*"))
    assert {entry.name for entry in root.iterdir()} == before
    assert [entry.name for entry in (root / "deep").iterdir()] == ["work"]


@pytest.mark.parametrize(("mode", "becomes"), [(0o6777, 0o755), (0o100, 0o755), (0o677, 0o644), (0o000, 0o644)])
def test_permissions_are_plain_whatever_the_archive_says(tmp_path: Path, mode: int, becomes: int) -> None:
    info, content = member("file", mode=mode)
    info.uid = info.gid = 12345
    file = extract(pack(tmp_path / "m.tar.gz", (info, content)), tmp_path / "out") / "file"
    assert stat.S_IMODE(file.stat().st_mode) == becomes
    assert file.stat().st_uid == os.getuid()


def test_everybody_may_read_the_directory(tmp_path: Path) -> None:
    directory = extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o755


def test_an_empty_folder_is_made(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("config.json"), member("empty", kind=tarfile.DIRTYPE))
    assert (extract(packed, tmp_path / "out") / "empty").is_dir()


def test_junk_of_macos_is_skipped(tmp_path: Path) -> None:
    packed = pack(
        tmp_path / "m.tar.gz",
        member("._model", b"junk"), member("model/._config.json", b"junk"), member("model/.DS_Store", b"junk"),
        member("__MACOSX/model/x", b"junk"), member("PaxHeader/config.json", b"junk"),
        member("model/config.json", b"{}"),
    )  # fmt: skip
    assert contents(extract(packed, tmp_path / "out")) == {"config.json": b"{}"}


def test_an_archive_without_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no files in it"):
        extract(pack(tmp_path / "m.tar.gz"), tmp_path / "out")


def test_an_existing_directory_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ArchiveError, match="exists already"):
        extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out")


def test_a_directory_made_meanwhile_is_not_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = archives._Extraction.run

    def slow(extraction: archives._Extraction) -> None:
        run(extraction)
        (tmp_path / "out" / "another's").mkdir(parents=True)

    monkeypatch.setattr(archives._Extraction, "run", slow)
    with pytest.raises(ArchiveError, match="was created meanwhile"):
        extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.tar.gz", "out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["another's"]


def test_what_is_not_there_is_no_archive(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"no archive at .*missing: expected a \.tar\.gz"):
        extract(tmp_path / "missing", tmp_path / "out")


def test_a_disk_that_fails_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, sink: object, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(ArchiveError, match=r"at member 'config\.json': it cannot be written \(.*No space left"):
        extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out")
