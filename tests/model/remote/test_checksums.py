from __future__ import annotations

import base64
import hashlib
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from djl_trtllm.model.remote import checksums
from djl_trtllm.model.remote.checksums import Claim, claim_of, crc64, joined_crc64, matches

CONTENT = bytes(range(256)) * 40
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html names the algorithms; the check
# values of "123456789" are those of the catalogue of parametrised CRCs.
CHECKED = b"123456789"
CRC64NVME = 0xAE8B14860A799888
CRC32C = 0xE3069283


def base64_of(value: int, size: int) -> str:
    return base64.b64encode(value.to_bytes(size, "big")).decode()


def of(algorithm: str, content: bytes) -> bytes:
    """A digest, by other means."""
    if algorithm == "CRC32":
        return zlib.crc32(content).to_bytes(4, "big")
    return hashlib.new(algorithm.lower(), content, usedforsecurity=False).digest()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "object"
    path.write_bytes(CONTENT)
    return path


def one_part() -> int:
    pytest.fail("asked for the size of parts")


@pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32C", "CRC32", "SHA256", "SHA1"])
def test_the_checksum_that_the_store_has_is_taken(algorithm: str) -> None:
    head = {f"Checksum{algorithm}": "abc=", "ETag": '"0123"'}
    assert claim_of(head, one_part) == Claim(algorithm, "abc=")


def test_of_several_the_one_over_the_whole_content_that_is_cheapest_counts() -> None:
    head = {f"Checksum{name}": name.lower() for name in ("SHA1", "SHA256", "CRC32", "CRC32C", "CRC64NVME")}
    for algorithm in ("CRC64NVME", "CRC32C", "CRC32", "SHA256", "SHA1"):
        assert claim_of(head, one_part) == Claim(algorithm, algorithm.lower())
        del head[f"Checksum{algorithm}"]
    assert claim_of(head, one_part) is None


def test_without_one_the_etag_is_an_md5() -> None:
    assert claim_of({"ETag": '"0123"'}, one_part) == Claim("MD5", "0123")
    assert claim_of({"ETag": '"0123-4"'}, lambda: 77) == Claim("MD5", "0123-4", 77)
    assert claim_of({"ETag": '"X0123X"'}, one_part) == Claim("MD5", "X0123X")
    assert claim_of({"ETag": ""}, one_part) is None


@pytest.mark.parametrize(
    "encryption",
    [{"ServerSideEncryption": "aws:kms"}, {"ServerSideEncryption": "aws:kms:dsse"}, {"SSECustomerAlgorithm": "AES256"}],
)
def test_the_etag_of_what_is_encrypted_with_a_customers_key_is_no_md5(encryption: dict[str, str]) -> None:
    assert claim_of({"ETag": '"0123"', **encryption}, one_part) is None
    assert claim_of({"ETag": '"0123"', "ServerSideEncryption": "AES256"}, one_part) == Claim("MD5", "0123")


def test_a_checksum_over_parts_wants_their_size() -> None:
    assert claim_of({"ChecksumSHA256": "abc=-3"}, lambda: 1024) == Claim("SHA256", "abc=-3", 1024)


@pytest.mark.parametrize("algorithm", ["SHA256", "SHA1", "CRC32"])
def test_a_file_is_compared_as_a_whole(file: Path, algorithm: str) -> None:
    claim = Claim(algorithm, base64.b64encode(of(algorithm, CONTENT)).decode())
    assert matches(claim, file)
    file.write_bytes(CONTENT[:-1] + b"x")
    assert not matches(claim, file)


def test_a_file_is_compared_with_its_md5(file: Path) -> None:
    assert matches(Claim("MD5", hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()), file)
    assert not matches(Claim("MD5", "0" * 32), file)


@pytest.mark.parametrize(
    ("algorithm", "value"), [("CRC64NVME", base64_of(CRC64NVME, 8)), ("CRC32C", base64_of(CRC32C, 4))]
)
def test_the_checksums_that_python_does_not_have_are_right(tmp_path: Path, algorithm: str, value: str) -> None:
    (tmp_path / "object").write_bytes(CHECKED)
    assert matches(Claim(algorithm, value), tmp_path / "object")
    (tmp_path / "object").write_bytes(CHECKED[::-1])
    assert not matches(Claim(algorithm, value), tmp_path / "object")


@pytest.mark.parametrize("part_size", [1000, 256, len(CONTENT), len(CONTENT) + 1])
@pytest.mark.parametrize("algorithm", ["SHA256", "CRC32"])
def test_a_file_is_compared_part_by_part(
    file: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, part_size: int
) -> None:
    monkeypatch.setattr(checksums, "_CHUNK", 300)  # parts are read in several pieces
    parts = [of(algorithm, CONTENT[at : at + part_size]) for at in range(0, len(CONTENT), part_size)]
    value = base64.b64encode(of(algorithm, b"".join(parts))).decode()
    assert matches(Claim(algorithm, f"{value}-{len(parts)}", part_size), file)
    assert not matches(Claim(algorithm, f"{value}-{len(parts) + 1}", part_size), file)
    assert not matches(Claim(algorithm, f"{value}-{len(parts)}", part_size + 1), file) or len(parts) == 1


def test_the_etag_of_an_upload_in_parts_is_compared(file: Path) -> None:
    parts = [hashlib.md5(CONTENT[at : at + 4000], usedforsecurity=False).digest() for at in (0, 4000, 8000)]
    value = hashlib.md5(b"".join(parts), usedforsecurity=False).hexdigest()
    assert matches(Claim("MD5", f"{value}-3", 4000), file)


def test_an_object_of_one_byte_has_one_part(tmp_path: Path) -> None:
    (tmp_path / "object").write_bytes(b"x")
    value = base64.b64encode(of("SHA256", of("SHA256", b"x"))).decode()
    assert matches(Claim("SHA256", f"{value}-1", 1), tmp_path / "object")


def test_an_empty_object_has_one_part(tmp_path: Path) -> None:
    (tmp_path / "object").touch()
    value = base64.b64encode(of("SHA256", of("SHA256", b""))).decode()
    for part_size in (1, 1000):
        assert matches(Claim("SHA256", f"{value}-1", part_size), tmp_path / "object")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pieces=st.lists(st.binary(max_size=50), max_size=5))
def test_the_checksums_of_pieces_join_to_that_of_the_whole(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    joined = joined_crc64(iter([(crc64(piece), len(piece)) for piece in pieces]))
    assert joined == base64_of(crc64(whole), 8)


def test_a_checksum_goes_on_where_it_stopped() -> None:
    assert crc64(CHECKED) == crc64(CHECKED[4:], crc64(CHECKED[:4])) == CRC64NVME
