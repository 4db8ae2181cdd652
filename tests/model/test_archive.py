from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.errors import ArchiveError, LayoutError
from djl_trtllm.model import archive as archives
from djl_trtllm.model.archive import Bounds, extract, is_archive, open_model

FILES = {"config.json": b"{}", "serving.properties": b"engine=Python\n", "weights/part": b"\x00\x01" * 5000}


def member(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.mode = 0o644
    content = content if kind == tarfile.REGTYPE else b""
    info.size = len(content)
    return info, content


def pack(path: Path, *members: tuple[tarfile.TarInfo, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def pack_files(path: Path, prefix: str = "", mode: str = "w:gz") -> Path:
    return pack(path, *(member(prefix + name, content) for name, content in FILES.items()), mode=mode)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()
    }


@pytest.mark.parametrize("prefix", ["", "./", "model/", "./model/", "anything else/", "a/b/"])
@pytest.mark.parametrize(
    ("name", "mode"), [("model.tar.gz", "w:gz"), ("m.tgz", "w:gz"), ("m.tar", "w"), ("artifact", "w:xz")]
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
        (member("link", kind=tarfile.SYMTYPE, link="/etc/passwd"), "symbolic link to '/etc/passwd'"),
        (member("link", kind=tarfile.LNKTYPE, link="config.json"), "hard link to 'config.json'"),
        (member("pipe", kind=tarfile.FIFOTYPE), "named pipe"),
        (member("disk", kind=tarfile.BLKTYPE), "a device"),
        (member("null", kind=tarfile.CHRTYPE), "a device"),
        (member("config.json"), "taken by an earlier member"),
        (member("config.json/inside"), "a file and a directory have the same name"),
        (member("d/" * 40 + "file"), "too long"),
    ],
)
def test_an_unsafe_member_is_refused_by_name_and_nothing_is_left(
    tmp_path: Path, bad: tuple[tarfile.TarInfo, bytes], says: str
) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("config.json"), bad)
    with pytest.raises(ArchiveError, match=says) as caught:
        extract(packed, tmp_path / "work" / "out")
    assert str(packed) in str(caught.value)
    assert bad[0].name[:60] in str(caught.value)
    assert list((tmp_path / "work").iterdir()) == []


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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_permissions_are_plain_whatever_the_archive_says(tmp_path: Path) -> None:
    info, content = member("run.sh")
    info.mode, info.uid, info.gid = 0o6777, 12345, 12345
    data, data_content = member("secret")
    data.mode = 0o000
    directory = extract(pack(tmp_path / "m.tar.gz", (info, content), (data, data_content)), tmp_path / "out")
    assert stat.S_IMODE((directory / "run.sh").stat().st_mode) == 0o755
    assert stat.S_IMODE((directory / "secret").stat().st_mode) == 0o644
    assert (directory / "run.sh").stat().st_uid == os.getuid()


def test_junk_of_macos_is_skipped(tmp_path: Path) -> None:
    packed = pack(
        tmp_path / "m.tar.gz",
        member("._model", b"junk"), member("model/._config.json", b"junk"), member("model/.DS_Store", b"junk"),
        member("__MACOSX/model/x", b"junk"), member("PaxHeader/config.json", b"junk"),
        member("model/config.json", b"{}"),
    )  # fmt: skip
    assert contents(extract(packed, tmp_path / "out")) == {"config.json": b"{}"}


def test_a_compression_bomb_is_stopped_while_it_is_read(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("zeros", bytes(20_000_000)))
    with pytest.raises(ArchiveError, match="which no model does"):
        extract(packed, tmp_path / "out", bounds=Bounds(ratio=100, ratio_from_bytes=1_000_000))
    assert not (tmp_path / "out").exists()


def test_total_size_is_bounded_also_by_skipped_members(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("._junk", bytes(2_000_000)), member("config.json"))
    with pytest.raises(ArchiveError, match=r"more than 1\.0 MiB"):
        extract(packed, tmp_path / "out", bounds=Bounds(total_bytes=1024**2))


def test_the_number_of_members_is_bounded(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", *(member(f"f{number}") for number in range(11)))
    with pytest.raises(ArchiveError, match="more than 10 members"):
        extract(packed, tmp_path / "out", bounds=Bounds(members=10))


def test_a_full_disk_is_foreseen(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"TiB\) are|are to stay free"):
        extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out", bounds=Bounds(spare_bytes=2**60))


def test_an_attribute_record_too_large_for_memory_is_refused(tmp_path: Path) -> None:
    record = tarfile.TarInfo("record")
    record.type, record.size = tarfile.XHDTYPE, 64 * 1024 * 1024
    with gzip.open(tmp_path / "m.tar.gz", "wb") as file:
        file.write(record.tobuf(tarfile.USTAR_FORMAT))
        for _ in range(64):
            file.write(bytes(1024 * 1024))
    with pytest.raises(ArchiveError, match=r"record after it has 64\.0 MiB"):
        extract(tmp_path / "m.tar.gz", tmp_path / "out")


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2", "w"])
@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_cut_off_archive_is_never_a_model(tmp_path: Path, mode: str, kept: float) -> None:
    whole = pack(tmp_path / "whole", *(member(f"f{number}", os.urandom(100_000)) for number in range(5)), mode=mode)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * kept)])
    with pytest.raises(ArchiveError, match="damaged or cut off"):
        extract(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_flipped_byte_fails_the_checksum(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("weights", os.urandom(100_000)))
    data = bytearray(packed.read_bytes())
    data[50_000] ^= 0xFF
    packed.write_bytes(data)
    with pytest.raises(ArchiveError, match="damaged"):
        extract(packed, tmp_path / "out")


def test_a_damaged_header_is_not_the_end_of_the_archive(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar", member("first"), member("second"), mode="w")
    data = bytearray(packed.read_bytes())
    data[1024:1030] = b"SECOND"
    packed.write_bytes(data)
    with pytest.raises(ArchiveError, match="header after it"):
        extract(packed, tmp_path / "out")


def test_an_archive_without_files_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no files in it"):
        extract(pack(tmp_path / "m.tar.gz"), tmp_path / "out")


def test_an_existing_directory_is_not_written_into(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(ArchiveError, match="exists already"):
        extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out")


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


def test_what_a_killed_extraction_left_is_cleaned_up(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "m.tar.gz")
    name = open_model(packed, tmp_path / "work").name
    (tmp_path / "work" / name).rename(tmp_path / "work" / f".{name}.partial-dead")
    assert contents(open_model(packed, tmp_path / "work")) == FILES
    assert not list((tmp_path / "work").glob("*partial*"))


def test_a_directory_with_one_archive_or_folder_is_descended(tmp_path: Path) -> None:
    # SageMaker puts the unpacked model.tar.gz, or what was in it, at /opt/ml/model.
    outer, nested = tmp_path / "opt", tmp_path / "nested"
    outer.mkdir()
    pack_files(outer / "model.tar.gz", "model/")
    (outer / "._model.tar.gz").write_bytes(b"junk")
    assert contents(open_model(outer, tmp_path / "work")) == FILES
    (nested / "a" / "b").mkdir(parents=True)
    (nested / "a" / "b" / "config.json").write_text("{}")
    assert open_model(nested, tmp_path / "work") == nested / "a" / "b"


def test_the_opened_path_errors_say_what_was_there(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="no model at"):
        open_model(tmp_path / "missing", tmp_path / "work")
    (tmp_path / "text").write_text("just some text")
    with pytest.raises(ArchiveError, match=r"is not a tar archive.*just some text"):
        open_model(tmp_path / "text", tmp_path / "work")
    (tmp_path / "broken.tar.gz").write_bytes(b"\x1f\x8b\x08broken")
    with pytest.raises(ArchiveError, match="damaged or cut off"):
        open_model(tmp_path / "broken.tar.gz", tmp_path / "work")


def test_archives_inside_archives_end(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "level0.tar.gz")
    for level in range(1, 12):
        packed = pack(tmp_path / f"level{level}.tar.gz", member(packed.name, packed.read_bytes()))
    with pytest.raises(ArchiveError, match="inside one another"):
        open_model(packed, tmp_path / "work")


def test_an_archive_is_known_by_content_or_by_name(tmp_path: Path) -> None:
    assert is_archive(pack_files(tmp_path / "whatever"))
    (tmp_path / "broken.tar.gz").write_bytes(b"broken")
    (tmp_path / "readme.txt").write_text("text")
    assert is_archive(tmp_path / "broken.tar.gz")
    assert not is_archive(tmp_path / "readme.txt")
    assert not is_archive(tmp_path)
