"""Archives that cost more than they have, and folders that nothing can be written to."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

import pytest

from djl_trtllm.errors import ArchiveError
from djl_trtllm.model.archive import extract, open_model
from tests.model.packing import member, pack, pack_files


def header(name: str, kind: bytes, size: int = 0) -> bytes:
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


def test_a_sparse_member_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "m.tar.gz"
    packed.write_bytes(gzip.compress(gnu_sparse(300_000_000) + bytes(1024)))
    assert packed.stat().st_size < 1500
    with pytest.raises(ArchiveError, match=r"at member 'big.bin': it is a sparse file; pack it whole"):
        extract(packed, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("major", ["0.0", "1.0"])
def test_a_sparse_member_of_the_newer_format_is_refused(tmp_path: Path, major: str) -> None:
    info, content = member("big.bin", b"1\n0\n512\n".ljust(512, b"\0") + b"x" * 512)
    records = {"GNU.sparse.size": "300000000", "GNU.sparse.realsize": "300000000", "GNU.sparse.name": "big.bin"}
    if major == "1.0":
        records |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    else:
        records |= {"GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0", "GNU.sparse.numbytes": "512"}
    info.pax_headers = records
    with pytest.raises(ArchiveError):
        extract(pack(tmp_path / "m.tar.gz", (info, content)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE])
@pytest.mark.parametrize("count", [20, 3000])
def test_a_chain_of_records_ends(tmp_path: Path, kind: bytes, count: int) -> None:
    packed = tmp_path / "m.tar.gz"
    record = b"9 a=long\n" if kind == tarfile.XHDTYPE else b"name"
    chain = (header("././@LongLink", kind, len(record)) + record.ljust(512, b"\0")) * count
    packed.write_bytes(gzip.compress(chain + header("config.json", tarfile.REGTYPE) + bytes(1024)))
    with pytest.raises(ArchiveError, match="more than 16 name or attribute records follow each other"):
        extract(packed, tmp_path / "out")


def test_each_member_may_have_its_records(tmp_path: Path) -> None:
    names = [f"{'long' * 40}/{number}" for number in range(50)]
    packed = pack(tmp_path / "m.tar", *map(member, names), mode="w")
    assert len(list(extract(packed, tmp_path / "out").iterdir())) == 50


@pytest.mark.parametrize("into", ["file/models", "a" * 300])
def test_a_folder_that_cannot_be_is_the_reason(tmp_path: Path, into: str) -> None:
    packed = pack_files(tmp_path / "m.tar.gz")
    (tmp_path / "file").write_text("")
    with pytest.raises(ArchiveError, match=r"cannot extract .*set option.engine_cache_dir to a folder that can be wri"):
        open_model(packed, tmp_path / into)
    with pytest.raises(ArchiveError, match="cannot extract"):
        extract(packed, tmp_path / into / "out")


def test_a_read_only_folder_is_the_reason(tmp_path: Path) -> None:
    packed = pack_files(tmp_path / "m.tar.gz")
    with pytest.raises(ArchiveError, match=r"cannot extract .* to /proc/self/models"):
        open_model(packed, Path("/proc/self/models"))


@pytest.mark.parametrize("kind", [tarfile.REGTYPE, b"Z"])
def test_a_member_that_is_not_there_is_not_looked_for_block_by_block(tmp_path: Path, kind: bytes) -> None:
    packed = tmp_path / "m.tar.gz"
    packed.write_bytes(gzip.compress(header("config.json", kind, 2**40)))
    with pytest.raises(ArchiveError):
        extract(packed, tmp_path / "out")


def test_a_skipped_member_that_is_not_there_ends_the_archive(tmp_path: Path) -> None:
    packed = tmp_path / "m.tar.gz"
    packed.write_bytes(gzip.compress(header(".DS_Store", tarfile.REGTYPE, 2**40)))
    with pytest.raises(ArchiveError, match=r"it has less than its headers say"):
        extract(packed, tmp_path / "out")
