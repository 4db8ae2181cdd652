"""How large an archive may be when it is extracted, and damaged archives."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from djl_trtllm.errors import ArchiveError
from djl_trtllm.model.archive import DEFAULT_BOUNDS, Bounds, extract
from tests.model.packing import contents, member, pack, pack_files, with_records


def test_the_bounds_are_those_of_large_models() -> None:
    assert (
        Bounds(
            total_bytes=2_199_023_255_552,
            members=100_000,
            ratio=1000,
            ratio_from_bytes=1_073_741_824,
            spare_bytes=268_435_456,
        )
        == DEFAULT_BOUNDS
    )


def test_total_size_is_bounded_to_the_byte(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "m.tar", mode="w")
    size = packed.stat().st_size
    extract(packed, tmp_path / "out", bounds=Bounds(total_bytes=size))
    with pytest.raises(ArchiveError, match="the archive extracts to more than"):
        extract(packed, tmp_path / "other", bounds=Bounds(total_bytes=size - 1))


@pytest.mark.parametrize(
    ("size", "shown"), [(512, "512 bytes"), (2048, r"2\.0 KiB"), (1_600_000, r"1\.5 MiB"), (0, "0 bytes")]
)
def test_total_size_is_bounded_also_by_skipped_members(tmp_path: Path, size: int, shown: str) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("._junk", bytes(2_000_000)), member("config.json"))
    with pytest.raises(ArchiveError, match=f"the archive extracts to more than {shown};"):
        extract(packed, tmp_path / "out", bounds=Bounds(total_bytes=size))


def test_a_compression_bomb_is_stopped_while_it_is_read(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("zeros", bytes(5_000_000)))
    with pytest.raises(ArchiveError, match="a ratio that no model reaches"):
        extract(packed, tmp_path / "out", bounds=Bounds(ratio=100, ratio_from_bytes=1_000_000))
    assert not (tmp_path / "out").exists()


def test_the_ratio_is_of_the_archives_own_size(tmp_path: Path) -> None:
    plain = pack_files(tmp_path / "m.tar", mode="w")
    extract(plain, tmp_path / "plain", bounds=Bounds(ratio=1, ratio_from_bytes=0))
    with pytest.raises(ArchiveError, match="a ratio that no model reaches"):
        extract(plain, tmp_path / "other", bounds=Bounds(ratio=0, ratio_from_bytes=0))
    dense = pack(tmp_path / "m.tar.gz", member("zeros", bytes(1_000_000)))
    extract(dense, tmp_path / "dense", bounds=Bounds(ratio=1000, ratio_from_bytes=0))


def test_below_a_size_the_ratio_does_not_count(tmp_path: Path) -> None:
    dense = pack(tmp_path / "m.tar.gz", member("zeros", bytes(1_000_000)))
    extract(dense, tmp_path / "out", bounds=Bounds(ratio=1, ratio_from_bytes=2_000_000))


def test_the_number_of_members_is_bounded(tmp_path: Path) -> None:
    packed = pack(tmp_path / "m.tar.gz", *(member(f"f{number}") for number in range(11)))
    with pytest.raises(ArchiveError, match="more than 10 members"):
        extract(packed, tmp_path / "out", bounds=Bounds(members=10))
    assert len(contents(extract(packed, tmp_path / "out", bounds=Bounds(members=11)))) == 11


SPARE = 1_000_000


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the disk says of itself: set `free.free`."""
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return usage


def test_the_archive_itself_must_fit_before_it_is_read(tmp_path: Path, free: SimpleNamespace) -> None:
    packed = pack(tmp_path / "m.tar", member("config.json"), member("__init__.py", b""), mode="w")
    size = packed.stat().st_size
    free.free = SPARE + size
    extract(packed, tmp_path / "out", bounds=Bounds(spare_bytes=SPARE))
    free.free -= 1
    with pytest.raises(ArchiveError, match=r"10\.0 KiB more are needed .*976\.6 KiB must stay free; free some space"):
        extract(packed, tmp_path / "other", bounds=Bounds(spare_bytes=SPARE))


def test_each_file_must_fit_before_it_is_written(tmp_path: Path, free: SimpleNamespace) -> None:
    packed = pack(tmp_path / "m.tar.gz", member("config.json"), member("zeros", bytes(2**20)))
    free.free = SPARE + 2**20
    extract(packed, tmp_path / "out", bounds=Bounds(spare_bytes=SPARE))
    free.free -= 1
    with pytest.raises(ArchiveError, match=r"1\.0 MiB more are needed"):
        extract(packed, tmp_path / "other", bounds=Bounds(spare_bytes=SPARE))


def test_an_empty_file_needs_no_room(tmp_path: Path, free: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(tmp_path / "m.tar", member("weights", bytes(50_000)), member("__init__.py", b""), mode="w")
    sizes = iter([SPARE + 100_000, SPARE + 50_000, SPARE])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(sizes)))
    assert set(contents(extract(packed, tmp_path / "out", bounds=Bounds(spare_bytes=SPARE)))) == {
        "weights",
        "__init__.py",
    }


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (1023, "1023 bytes"),
        (1024, r"1\.0 KiB"),
        (3 * 2**20, r"3\.0 MiB"),
        (5 * 2**30, r"5\.0 GiB"),
        (7 * 2**40, r"7\.0 TiB"),
        (2**50, r"1024\.0 TiB"),
    ],
)
def test_a_full_disk_is_reported_with_what_is_free(
    tmp_path: Path, free: SimpleNamespace, size: int, shown: str
) -> None:
    free.free = size
    with pytest.raises(ArchiveError, match=f"and {shown} are free"):
        extract(pack_files(tmp_path / "m.tar.gz"), tmp_path / "out", bounds=Bounds(spare_bytes=2**60))


def records_of(path: Path, size: int) -> Path:
    """An archive that begins with an attribute record of this size."""
    text = f"{size} comment=".encode()
    record = tarfile.TarInfo("record")
    record.type, record.size = tarfile.XHDTYPE, size
    info, content = member("config.json", bytes(512))
    with path.open("wb") as file:
        file.write(record.tobuf(tarfile.USTAR_FORMAT))
        file.write(text + b"x" * (size - len(text) - 1) + b"\n" + bytes(-size % 512))
        file.write(info.tobuf(tarfile.USTAR_FORMAT) + content + bytes(1024))
    return path


def test_an_attribute_record_may_have_a_mebibyte_and_no_byte_more(tmp_path: Path) -> None:
    directory = extract(records_of(tmp_path / "m.tar", 2**20), tmp_path / "out")
    assert [path.name for path in directory.iterdir()] == ["config.json"]
    with pytest.raises(ArchiveError, match=r"record after it has 1\.0 MiB"):
        extract(records_of(tmp_path / "larger.tar", 2**20 + 1), tmp_path / "other")


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2", "w"])
@pytest.mark.parametrize("kept", [0.2, 0.5, 0.9])
def test_a_cut_off_archive_is_never_a_model(tmp_path: Path, mode: str, kept: float) -> None:
    whole = pack(tmp_path / "whole", *(member(f"f{number}", os.urandom(100_000)) for number in range(5)), mode=mode)
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(whole.read_bytes()[: int(whole.stat().st_size * kept)])
    with pytest.raises(ArchiveError, match="damaged or truncated"):
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


def test_a_damaged_first_header_is_reported(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "m.tar", mode="w")
    packed.write_bytes(b"CONFIG" + packed.read_bytes()[6:])
    with pytest.raises(ArchiveError, match=r"at member '\(its first member\)': it is damaged or truncated"):
        extract(packed, tmp_path / "out")


@pytest.mark.parametrize("records", [{"GNU.sparse.map": "a,b"}, {"GNU.sparse.size": "x"}])
def test_damaged_attribute_records_are_reported(tmp_path: Path, records: dict[str, str]) -> None:
    packed = pack(tmp_path / "m.tar", member("one"), with_records("two", **records), mode="w")
    with pytest.raises(ArchiveError, match=r"at member 'one': its header is damaged \(.*; make or download it again"):
        extract(packed, tmp_path / "out")
