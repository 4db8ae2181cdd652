from __future__ import annotations

import fcntl
import gzip
import io
import lzma
import os
import random
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import threading
import zlib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from djl_trtllm.errors import ArchiveError, LayoutError, ModelError
from djl_trtllm.model import archive as archives, work_directory
from djl_trtllm.model.archive import extract, is_archive, open_model, package
from djl_trtllm.model.work_directory import SPARE_BYTES, TEMPORARY_PREFIX, is_abandoned, marked, temporary_directory
from tests.support.tables import by_rows

FILES = {"config.json": b"{}", "serving.properties": b"engine=Python\n", "weights/part": b"\x00\x01" * 5000}

Member = tuple[tarfile.TarInfo, bytes]


def member(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = "", mode: int = 0o644
) -> Member:
    """A member; only regular files have content."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = link
    info.mode = mode
    content = content if kind == tarfile.REGTYPE else b""
    info.size = len(content)
    return info, content


def with_records(name: str, **records: str) -> Member:
    """A member with attribute records, which may say anything."""
    info, content = member(name)
    info.pax_headers = records
    return info, content


def pack(path: Path, *members: Member, mode: str = "w:gz") -> Path:
    """Write an archive of these members."""
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return path


def pack_files(path: Path, prefix: str = "", mode: str = "w:gz") -> Path:
    """Write an archive of `FILES`."""
    return pack(path, *(member(prefix + name, content) for name, content in FILES.items()), mode=mode)


def contents(directory: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {
        str(file.relative_to(directory)): file.read_bytes() for file in sorted(directory.rglob("*")) if file.is_file()
    }


@by_rows("prefix", ["", "./", "model/", "./model/", "anything else/", "a/b/"])
@by_rows(
    ("name", "mode"),
    [("model.tar.gz", "w:gz"), ("m.tgz", "w:gz"), ("m.tar", "w"), ("artifact", "w:xz"), ("other", "w:bz2")],
)
def test_with_or_without_a_top_folder_the_model_directory_is_opened(
    tmp_path: Path, prefix: str, name: str, mode: str
) -> None:
    assert contents(open_model(pack_files(tmp_path / name, prefix, mode), tmp_path / "work")) == FILES


@by_rows(
    ("bad", "says"),
    [
        (member("/etc/passwd"), "leads out"),
        (member("../outside"), "leads out"),
        (member("model/../../outside"), "leads out"),
        (member("a/.."), "leads out"),
        (with_records("nul", path="a\0b"), "leads out"),
        (member("link", kind=tarfile.SYMTYPE, link="/etc/passwd"), "it is a symbolic link to '/etc/passwd';"),
        (member("link", kind=tarfile.LNKTYPE, link="config.json"), "it is a hard link to 'config.json';"),
        (member("pipe", kind=tarfile.FIFOTYPE), "it is a named pipe;"),
        (member("disk", kind=tarfile.BLKTYPE), "it is a device;"),
        (member("null", kind=tarfile.CHRTYPE), "it is a device;"),
        (member("config.json"), "an earlier member has the same path"),
        (member("config.json/inside"), "a file and a directory have the same name"),
        (member("d/" * 32 + "file"), "its path is too long;"),
        (member("d/" + "f" * 256), "its path is too long;"),
    ],
)
def test_an_unsafe_member_is_refused_by_name_and_nothing_is_left(tmp_path: Path, bad: Member, says: str) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("config.json"), bad)
    with pytest.raises(ArchiveError, match=says) as caught:
        extract(packed, tmp_path / "work" / "out")
    assert str(packed) in str(caught.value)
    assert repr(bad[0].pax_headers.get("path", bad[0].name)[:200]) in str(caught.value)
    assert list((tmp_path / "work").iterdir()) == []


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
    ),
    mode=st.sampled_from(["w", "w", "w:gz", "w:bz2", "w:xz"]),
    damage=st.none() | st.tuples(st.floats(0, 1), st.binary(max_size=3), st.floats(0, 1)),
)
def test_nothing_is_ever_written_outside(
    tmp_path_factory: pytest.TempPathFactory,
    members: list[tuple[list[str], bool, bytes, str]],
    mode: str,
    damage: tuple[float, bytes, float] | None,
) -> None:
    """`damage`: bytes at some place of the archive, in the stead of others up to another place."""
    root = tmp_path_factory.mktemp("escape")
    packed = root / "m.tar"
    with tarfile.open(packed, mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for parts, absolute, kind, link in members:
            info, content = member(("/" if absolute else "") + "/".join(parts), b"x", kind, link)
            tar.addfile(info, io.BytesIO(content))
    if damage is not None:
        data = packed.read_bytes()
        packed.write_bytes(data[: int(damage[0] * len(data))] + damage[1] + data[int(damage[2] * len(data)) :])
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
    extract(pack(tmp_path / "m.tar.gz", (info, content)), tmp_path / "out")
    status = (tmp_path / "out" / "file").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (becomes, os.getuid())
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


def test_junk_is_skipped_and_everything_else_taken_as_it_is(tmp_path: Path) -> None:
    long = ["d/" * 31 + "file", "d/" + "f" * 255, *(f"{'long' * 40}/{number}" for number in range(50))]
    packed = pack(
        tmp_path / "m.tar.gz",
        member("._model", b"junk"), member("model/._config.json", b"junk"), member("model/.DS_Store", b"junk"),
        member("__MACOSX/model/x", b"junk"), member("PaxHeader/config.json", b"junk"),
        *map(member, long), member("empty", kind=tarfile.DIRTYPE),
    )  # fmt: skip
    extract(packed, tmp_path / "out")
    assert contents(tmp_path / "out") == dict.fromkeys(long, b"x")
    assert (tmp_path / "out" / "empty").is_dir()


def test_a_disk_that_fails_is_not_the_archives_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: object, sink: object, length: int) -> None:
        raise OSError(28, "No space left on device")

    packed = pack_files(tmp_path / "m.tar.gz")
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "models", tmp_path / ("a" * 300), Path("/proc/self/models")):
        with pytest.raises(ArchiveError, match=rf"cannot extract .* to {place}: .*set option\.engine_cache_dir"):
            open_model(packed, place)
    monkeypatch.setattr(shutil, "copyfileobj", fail)
    with pytest.raises(ArchiveError, match=r"at member 'config\.json': it cannot be written \(.*No space left"):
        open_model(packed, tmp_path / "work")


def bound(monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    for name, value in bounds.items():
        monkeypatch.setattr(archives, name, value)


def test_total_size_is_bounded_to_the_byte_and_also_by_skipped_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack_files(tmp_path / "m.tar", mode="w")
    size = packed.stat().st_size
    bound(monkeypatch, MOST_BYTES=size)
    extract(packed, tmp_path / "out")
    bound(monkeypatch, MOST_BYTES=size - 1)
    with pytest.raises(ArchiveError, match="the archive extracts to more than"):
        extract(packed, tmp_path / "other")
    packed = pack(tmp_path / "m.tar.gz", member("._junk", bytes(2_000_000)), member("config.json"))
    bound(monkeypatch, MOST_BYTES=1_600_000)
    with pytest.raises(ArchiveError, match=r"the archive extracts to more than 1\.6 MB;"):
        extract(packed, tmp_path / "other")


def test_a_compression_bomb_is_stopped_by_its_ratio_to_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = pack_files(tmp_path / "m.tar", mode="w")
    dense = pack(tmp_path / "m.tar.gz", member("zeros", bytes(1_000_000)))
    cases = [(plain, 1, 0, True), (plain, 0, 0, False), (dense, 1000, 0, True), (dense, 100, 900_000, False),
             (dense, 1, 2_000_000, True)]  # fmt: skip
    for number, (packed, ratio, above, fits) in enumerate(cases):
        bound(monkeypatch, MOST_RATIO=ratio, RATIO_FROM_BYTES=above)
        with nullcontext() if fits else pytest.raises(ArchiveError, match="a ratio that no model reaches"):
            extract(packed, tmp_path / str(number))
        assert (tmp_path / str(number)).exists() is fits


def test_the_bounds_are_beyond_what_a_model_needs() -> None:
    assert (archives.MOST_BYTES, archives.MOST_MEMBERS) == (2 << 40, 100_000)
    assert (archives.MOST_RATIO, archives.RATIO_FROM_BYTES) == (1_000, 1 << 30)


def test_the_ratio_of_a_small_archive_is_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound(monkeypatch, MOST_RATIO=1)
    extract(pack(tmp_path / "m.tar.gz", member("zeros", bytes(10_000))), tmp_path / "out")


def test_the_number_of_members_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(tmp_path / "m.tar.gz", *(member(f"f{number}") for number in range(11)))
    bound(monkeypatch, MOST_MEMBERS=10)
    with pytest.raises(ArchiveError, match="more than 10 members"):
        open_model(packed, tmp_path / "out")
    bound(monkeypatch, MOST_MEMBERS=11)
    assert len(contents(open_model(packed, tmp_path / "out"))) == 11


def test_archive_and_files_must_fit_on_the_disk_before_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extracted(packed: Path, *free: int) -> None:
        left = [SPARE_BYTES + size for size in free]
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: SimpleNamespace(free=left.pop(0) if left[1:] else left[0])
        )
        extract(packed, tmp_path / str(random.random()))

    small = pack(tmp_path / "m.tar", member("config.json"), member("__init__.py", b""), mode="w")
    size = small.stat().st_size
    extracted(small, size)
    with pytest.raises(
        ArchiveError, match=r"10\.2 kB more are needed .* and 268\.4 MB are free \(268\.4 MB stay free\)"
    ):
        extracted(small, size - 1)
    dense = pack(tmp_path / "m.tar.gz", member("config.json"), member("zeros", bytes(2**20)))
    extracted(dense, 2**20)
    with pytest.raises(ArchiveError, match=r"1\.0 MB more are needed"):
        extracted(dense, 2**20 - 1)
    extracted(small, size, 1, 0)  # an empty file needs no room


@by_rows("mode", ["w:gz", "w:xz", "w:bz2", "w"])
@by_rows("kept", [0.2, 0.5, 0.9])
def test_a_cut_off_archive_is_never_a_model(tmp_path: Path, mode: str, kept: float) -> None:
    whole = pack(tmp_path / "whole", *(member(f"f{number}", os.urandom(100_000)) for number in range(5)), mode=mode)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * kept)])
    with pytest.raises(ArchiveError, match="damaged or truncated"):
        extract(cut, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def header(name: str, kind: bytes = tarfile.REGTYPE, size: int = 0) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def gnu_sparse(size: int) -> bytes:
    """A sparse member of 300 bytes, in GNU's old format, as `tar -S` writes it."""
    block = bytearray(header("big.bin", tarfile.GNUTYPE_SPARSE, 512))
    # One piece at the end of the file, and the size that the file has.
    block[386:398] = b"%011o\0" % (size - 512)
    block[398:410] = b"%011o\0" % 512
    block[483:495] = b"%011o\0" % size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + b"x" * 512


def record(size: int) -> bytes:
    """An attribute record of this size, with its header."""
    text = f"{size} comment=".encode()
    return header("record", tarfile.XHDTYPE, size) + text + b"x" * (size - len(text) - 1) + b"\n" + bytes(-size % 512)


def sparse(**records: str) -> bytes:
    """A sparse member of a newer format."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info, content = member("big.bin", b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512)
        named = {"size": "300000000", "realsize": "300000000", "name": "big.bin", **records}
        info.pax_headers = {f"GNU.sparse.{name}": value for name, value in named.items()}
        tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def changed(*members: Member, at: int, to: bytes) -> bytes:
    """A plain archive with other bytes at a place."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    data = bytearray(packed.getvalue())
    data[at : at + len(to)] = to
    return bytes(data)


ONE, TWO = member("one"), member("two")


@by_rows(
    ("content", "says"),
    [
        (changed(ONE, TWO, at=0, to=b"CONFIG"), r"at member '\(its first member\)': it is damaged or truncated"),
        (changed(ONE, TWO, at=1024, to=b"SECOND"), r"at member 'one': .*the header after it"),
        (
            changed(ONE, with_records("x", **{"GNU.sparse.map": "a,b"}), at=0, to=b""),
            r"'one': its header is damaged \(",
        ),
        (changed(ONE, with_records("x", **{"GNU.sparse.size": "x"}), at=0, to=b""), r"'one': its header is damaged \("),
        (gnu_sparse(300_000_000), r"at member 'big.bin': it is a sparse file; pack it whole"),
        (sparse(major="1", minor="0"), "cannot extract"),
        (sparse(numblocks="1", offset="0", numbytes="512"), "cannot extract"),
        (record(2**20 + 1) + header("x"), r"record after it has 1\.0 MB"),
        # What a header says and is not there is not looked for block by block.
        (header("config.json", size=2**40), "cannot extract"),
        (header("config.json", b"Z", 2**40), "cannot extract"),
        (header(".DS_Store", size=2**40), "it has less than its headers say"),
        (b"", "there are no files in it"),
    ],
)
def test_a_damaged_or_odd_archive_is_refused_by_its_member(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "m.tar.gz").write_bytes(gzip.compress(content + bytes(1024)))
    with pytest.raises(ArchiveError, match=says):
        extract(tmp_path / "m.tar.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_attribute_record_may_have_a_mebibyte(tmp_path: Path) -> None:
    (tmp_path / "m.tar").write_bytes(record(2**20) + header("config.json") + bytes(1024))
    extract(tmp_path / "m.tar", tmp_path / "out")
    assert contents(tmp_path / "out") == {"config.json": b""}


def test_a_file_may_be_larger_than_a_record(tmp_path: Path) -> None:
    """Only records are read into memory."""
    large = bytes(3 << 20)
    extract(pack(tmp_path / "m.tar", member("weights", large), mode="w"), tmp_path / "out")
    assert contents(tmp_path / "out") == {"weights": large}


def test_a_flipped_byte_fails_the_checksum(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("weights", os.urandom(100_000)))
    data = bytearray(packed.read_bytes())
    data[50_000] ^= 0xFF
    packed.write_bytes(data)
    with pytest.raises(ArchiveError, match="damaged"):
        extract(packed, tmp_path / "out")


@by_rows("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
@by_rows("count", [20, 3000])
def test_a_chain_of_records_ends(tmp_path: Path, kind: bytes, count: int) -> None:
    packed = tmp_path / "m.tar.gz"
    content = b"9 a=long\n" if kind == tarfile.XHDTYPE else b"name"
    chain = (header("././@LongLink", kind, len(content)) + content.ljust(512, b"\0")) * count
    packed.write_bytes(gzip.compress(chain + header("config.json") + bytes(1024)))
    with pytest.raises(ArchiveError, match="more than 16 name or attribute records follow each other"):
        extract(packed, tmp_path / "out")


# -- opening and packing -----------------------------------------------------------------------------------------------


def test_a_directory_is_opened_as_it_is(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert open_model(model, tmp_path / "work") == model
    assert not (tmp_path / "work").exists()


def test_opening_the_same_content_again_extracts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_files(tmp_path / "m.tar.gz", "model/")
    first = open_model(packed, tmp_path / "work")
    other = open_model(pack(tmp_path / "m.tar", member("config.json", b"2"), mode="w"), tmp_path / "work")
    assert contents(first) == FILES and contents(other) == {"config.json": b"2"}
    monkeypatch.setattr(archives, "extract", lambda *_, **__: pytest.fail("extracted again"))
    first.parent.with_name(f".{first.parent.name}.1.ab.partial").touch()  # cannot be removed as a folder: no matter
    assert open_model(packed.rename(tmp_path / "other name"), tmp_path / "work") == first


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
    deepest = tmp_path.joinpath("0", *(f"{number}a" for number in range(1, 16)))
    (deepest / "further").mkdir(parents=True)
    (deepest / "config.json").touch()
    assert open_model(tmp_path / "0", tmp_path / "work") == deepest
    (deepest / "config.json").rename(deepest / "further" / "config.json")
    with pytest.raises(ArchiveError, match="more than 16 archives and folders inside one another"):
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
    for level in range(1, 9):
        packed = pack(tmp_path / f"level{level}.tar.gz", member(packed.name, packed.read_bytes()))
    assert contents(open_model(tmp_path / "level7.tar.gz", tmp_path / "work")) == FILES
    with pytest.raises(ArchiveError, match="inside one another"):
        open_model(packed, tmp_path / "work")


def test_an_archive_is_known_by_content_or_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_archive(pack_files(tmp_path / "whatever"))
    for name in ("m.tar", "m.tar.gz", "m.tgz", "m.tar.bz2", "m.tar.xz", "M.TAR.GZ"):
        (tmp_path / name).write_bytes(b"broken")
        assert is_archive(tmp_path / name), name
    (tmp_path / "readme.txt").write_text("text")
    assert not is_archive(tmp_path / "readme.txt")
    assert not is_archive(tmp_path)
    for error in (OSError, EOFError, zlib.error, lzma.LZMAError):
        monkeypatch.setattr(tarfile, "is_tarfile", Mock(side_effect=error("damaged")))
        assert not is_archive(tmp_path / "readme.txt")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    (directory / "engine").mkdir(parents=True)
    (directory / "serving.properties").write_text("option.max_input_len=256\n")
    (directory / "engine" / "model.bin").write_bytes(bytes(range(256)) * 100)
    (directory / "run.sh").write_text("#!/bin/sh\n")
    (directory / "run.sh").chmod(0o755)
    (directory / "__pycache__").mkdir()
    (directory / "__pycache__" / "x.pyc").write_bytes(b"x")
    (directory / ".git").mkdir()
    (directory / ".git" / "config").write_text("")
    return directory


def test_an_archive_holds_the_files_at_its_top_and_the_same_files_make_the_same_bytes(
    model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
    package(model, model / "model.tar.gz")
    assert package(model, model / "model.tar.gz") == ["engine/model.bin", "run.sh", "serving.properties"]  # not itself
    package(copy, tmp_path / "b.tar.gz")
    assert (model / "model.tar.gz").read_bytes() == (tmp_path / "b.tar.gz").read_bytes()
    extract(tmp_path / "b.tar.gz", tmp_path / "opened")
    assert (tmp_path / "opened/engine/model.bin").read_bytes() == (model / "engine/model.bin").read_bytes()
    assert os.access(tmp_path / "opened" / "run.sh", os.X_OK)


def test_packed_files_are_readable_by_all_and_programs_may_be_run(model: Path, tmp_path: Path) -> None:
    for mode, packed in ((0o600, 0o644), (0o700, 0o755), (0o644, 0o644)):
        (model / "run.sh").chmod(mode)
        package(model, tmp_path / "out.tar.gz")
        with tarfile.open(tmp_path / "out.tar.gz") as archive:
            assert archive.getmember("run.sh").mode == packed


def test_what_cannot_be_packed_is_an_error(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no files to pack"):
        package(tmp_path / "empty", tmp_path / "model.tar.gz")
    with pytest.raises(ModelError, match="cannot write"):
        package(model, tmp_path / "missing" / "model.tar.gz")


def test_links_inside_are_followed_and_links_out_are_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer.json").symlink_to(model / "serving.properties")
    assert "tokenizer.json" in package(model, tmp_path / "a.tar.gz")
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        assert all(member.isreg() for member in archive)
    (model / "secret").symlink_to("/etc/passwd")
    with pytest.raises(ModelError, match="is a link out of"):
        package(model, tmp_path / "b.tar.gz")
    assert not list(tmp_path.glob("*b.tar.gz*"))


# -- work directories -------------------------------------------------------------------------------------------------


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
