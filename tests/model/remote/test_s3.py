"""S3's addresses, client, errors and checksums, and files that arrive in parts."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
)
from hypothesis import given, strategies as st

from djl_trtllm.errors import DownloadError
from djl_trtllm.model.remote import s3
from djl_trtllm.model.remote.s3 import S3Address, is_s3
from djl_trtllm.model.remote.s3_download import Claim, PartialFile, RemoteObject, claim_of, crc64, joined_crc64, matches
from tests.support.s3 import Store
from tests.support.tables import by_rows, by_table


@by_table("text", "bucket", "key")
def test_an_address_is_a_bucket_and_a_key(text: str, bucket: str, key: str) -> None:
    address = S3Address.parse(text)
    assert is_s3(text) and address == (bucket, key) and str(address) == f"s3://{bucket}/{key}"
    assert address.below("x/y") == (f"{key}/x/y" if key else "x/y")


@by_rows(
    "text", ["s3://", "s3:///key", "s3://arn:aws:s3:::models", "/opt/ml/model", "models/story", "hf://acme/story", ""]
)
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(DownloadError, match=f"{text} is not an S3 address: expected s3://BUCKET/PREFIX"):
        S3Address.parse(text)


def said(error: Exception) -> str:
    with pytest.raises(DownloadError, match=r"^s3://models/it: ") as caught, s3.download_errors("s3://models/it"):
        raise error
    assert caught.value.__cause__ is error
    return str(caught.value)


def answer(code: str, status: int = 400, message: str = "", /, **headers: str) -> ClientError:
    metadata: Any = {"HTTPStatusCode": status, "HTTPHeaders": headers}
    return ClientError({"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata}, "GetObject")


REMEDIES = {
    "AWS_ENDPOINT_URL": ["NoSuchBucket"],
    "no such object": ["NoSuchKey", "404"],
    "s3:GetObject and s3:ListBucket there, and to write s3:PutObject and s3:DeleteObject": ["AccessDenied", "403"],
    "`aws sso login`": ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"],
    "AWS_SESSION_TOKEN": ["InvalidToken"],
    "AWS_ACCESS_KEY_ID": ["InvalidAccessKeyId"],
    "AWS_SECRET_ACCESS_KEY": ["SignatureDoesNotMatch"],
    "clock is wrong": ["RequestTimeTooSkewed", "RequestExpired"],
    "AWS_REGION": ["AuthorizationHeaderMalformed", "PermanentRedirect", "301"],
    "try again later": ["SlowDown"],
    "restore it": ["InvalidObjectState"],
}


def test_an_answer_says_what_to_do() -> None:
    for remedy, codes in REMEDIES.items():
        for code in codes:
            text = said(answer(code))
            assert remedy in text and text.endswith(f"({code})")
    redirected = answer("PermanentRedirect", **{"x-amz-bucket-region": "eu-west-1"})
    assert said(redirected).endswith("(PermanentRedirect, the bucket is in eu-west-1)")
    assert said(answer("Teapot", 418, "short and stout")).endswith("answered Teapot (short and stout), status 418")
    assert said(ClientError({}, "GetObject")).endswith("answered  (), status 0")
    assert s3.status(answer("x", 412)) == 412


@by_rows(
    ("error", "remedy"),
    [
        (NoCredentialsError(), "give the machine a role, or set AWS_ACCESS_KEY_ID"),
        (PartialCredentialsError(provider="env", cred_var="x"), "give the machine a role"),
        (CredentialRetrievalError(provider="sso", error_msg="no"), "credentials cannot be had"),
        (ProfileNotFound(profile="dev"), "check AWS_PROFILE (The config profile (dev)"),
        (EndpointConnectionError(endpoint_url="http://x"), "check the network, the region and AWS_ENDPOINT_URL"),
        (ConnectTimeoutError(endpoint_url="http://x"), "cannot be reached: check the network"),
        (ParamValidationError(report="bad"), "ParamValidationError: "),
    ],
)
def test_what_fails_on_this_side_says_what_to_do(error: Exception, remedy: str) -> None:
    assert remedy in said(error)


def asked(*answers: str, until: float = 1e9) -> tuple[list[float], str]:
    """How long a store that answers with these errors, and then well, is waited for; and the last answer."""
    left, waited = list(answers), list[float]()

    def call() -> str:
        if left:
            raise answer(left.pop(0), 503)
        return "well"

    try:
        return waited, s3.patiently(call, until, waited.append)
    except ClientError as error:
        return waited, error.response["Error"]["Code"]


def test_a_store_that_is_asked_too_often_is_asked_again_after_longer_and_longer_pauses() -> None:
    waited, last = asked(*["SlowDown"] * 9, "503", "ServiceUnavailable")
    assert last == "well" and len(waited) == 11
    for pause, longest in zip(waited, [0.5, 1, 2, 4, 8, 16, *[30] * 5], strict=True):
        assert longest / 2 <= pause <= longest
    assert asked("AccessDenied") == ([], "AccessDenied")
    assert asked() == ([], "well")


def test_a_store_is_not_asked_again_once_the_time_is_over_or_the_download_has_ended() -> None:
    assert asked("SlowDown", until=time.monotonic() + 0.25) == ([], "SlowDown")
    times: list[float] = []

    def stopped(seconds: float) -> bool:
        times.append(seconds)
        return True

    def refuse() -> None:
        raise answer("SlowDown", 503)

    with pytest.raises(ClientError):
        s3.patiently(refuse, 1e9, stopped)
    assert len(times) == 1


def test_other_errors_are_passed_on() -> None:
    with pytest.raises(ValueError, match="mine"), s3.download_errors("it"):
        raise ValueError("mine")


def test_one_client_serves_until_the_environment_changes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first = s3.client()
    monkeypatch.setenv("PATH", "/elsewhere")
    assert s3.client() is first
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert s3.client() is not first
    config = first.meta.config
    assert (config.max_pool_connections, config.connect_timeout, config.read_timeout) == (64, 10, 30)
    assert config.retries == {"mode": "standard", "total_max_attempts": 6}
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(DownloadError, match=r"S3: .*check AWS_PROFILE .*no-such-profile"):
        s3.client()


@by_table("variables", "region")
def test_the_region_of_the_container_comes_first(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], region: str
) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", **variables}.items():
        monkeypatch.setenv(name, value)
    assert s3.client().meta.region_name == region


# -- files in parts ----------------------------------------------------------------------------------------------------

CONTENT = b"0123456789"


def file_of(path: Path, size: int = 10, etag: str = "e", part_size: int = 4) -> PartialFile:
    return PartialFile(path, RemoteObject("model.bin", "key", size, etag), part_size)


def bring(file: PartialFile, *indices: int) -> list[bool]:
    """Write and note parts; what noting each said."""
    said = []
    for index in indices:
        start, end = file.part(index)
        file.write(start, CONTENT[start:end])
        said.append(file.note(index, 100 + index))
    return said


def open_files(path: Path) -> int:
    """How many descriptors of this process are of a file."""
    return sum(os.path.realpath(entry) == str(path) for entry in Path("/proc/self/fd").iterdir())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "below" / "model.bin"


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir()) if path.parent.exists() else []


def test_a_file_arrives_in_parts_in_any_order_also_after_another_start(path: Path) -> None:
    file = file_of(path)
    assert (file.parts, file.missing(), file.missing_bytes, names(path)) == (3, [0, 1, 2], 10, [])
    assert [file.part(index) for index in range(3)] == [(0, 4), (4, 8), (8, 10)]
    assert bring(file, 2, 0) == [False, False]
    assert (file.missing(), file.missing_bytes, file.complete) == ([1], 4, False)
    assert open_files(path.with_name("model.bin.arriving")) == 1
    file.close()
    file.close()
    assert open_files(path.with_name("model.bin.arriving")) == 0
    file = file_of(path)
    assert file.missing() == [1] and bring(file, 1) == [True]
    assert list(file.crcs()) == [(100, 4), (101, 4), (102, 2)]
    assert names(path) == ["model.bin.arriving", "model.bin.parts"]
    file.finish()
    assert open_files(path) == 0 and path.read_bytes() == CONTENT and names(path) == ["model.bin"]
    assert (file.complete, file.missing(), file.missing_bytes, file.missing_blocks) == (True, [], 0, 0)
    assert file_of(path).complete  # as another start finds it


@pytest.mark.parametrize("other", [{"size": 9}, {"etag": "f"}, {"part_size": 5}], ids=str)
def test_parts_of_something_else_are_started_anew(path: Path, other: dict[str, Any]) -> None:
    bring(file_of(path), 0, 2)
    file = file_of(path, **other)
    assert len(file.missing()) == file.parts and names(path) == []


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "journal empty": lambda journal, file: journal.write_bytes(b""),
    "journal cut off": lambda journal, file: journal.write_bytes(b"{"),
    "journal of another kind": lambda journal, file: journal.write_bytes(b"[]\n"),
    "journal of an older version": lambda journal, file: journal.write_bytes(
        b'{"size":10,"etag":"e","part_size":4}\n[0,1]\n'
    ),
    "wrong line": lambda journal, file: journal.write_bytes(b'[10,"e",4]\n["0",1]\n'),
    "no journal": lambda journal, file: journal.unlink(),
    "no file": lambda journal, file: file.unlink(),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "last line cut off"])
def test_a_damaged_or_lost_journal_is_not_believed(path: Path, damage: str) -> None:
    bring(file_of(path), 0, 2)
    journal, file = path.with_name("model.bin.parts"), path.with_name("model.bin.arriving")
    if damage in DAMAGES:
        DAMAGES[damage](journal, file)
        assert file_of(path).missing() == [0, 1, 2] and names(path) == []
    else:
        journal.write_bytes(journal.read_bytes()[:-1])
        assert file_of(path).missing() == [1, 2]


def test_what_is_discarded_comes_again_and_a_journal_that_has_gone_is_no_matter(path: Path) -> None:
    mask = os.umask(0)
    try:
        for end in (PartialFile.discard, PartialFile.discard, PartialFile.finish):
            file = file_of(path)
            assert bring(file, 0, 1, 2) == [False, False, True]
            path.with_name("model.bin.parts").unlink()
            end(file)
            assert end is PartialFile.finish or (names(path), file.missing()) == ([], [0, 1, 2])
    finally:
        os.umask(mask)
    assert names(path) == ["model.bin"] and stat.S_IMODE(path.stat().st_mode) == 0o644  # others may read it


def test_an_empty_file_has_no_parts(path: Path) -> None:
    file = file_of(path, size=0)
    assert (file.parts, file.missing(), file.missing_bytes) == (0, [], 0)
    file.finish()
    assert path.read_bytes() == b"" and names(path) == ["model.bin"]


def test_a_folder_of_that_name_is_no_file(path: Path) -> None:
    path.mkdir(parents=True)
    assert not file_of(path).complete


def test_the_disk_is_asked_for_all_of_it_at_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(path, size=1_000_000, part_size=1000)
    assert file.missing_blocks == 1_000_000
    file.write(0, b"x")
    assert path.with_name("model.bin.arriving").stat().st_size == 1_000_000
    assert (file.missing_bytes, file.missing_blocks) == (1_000_000, 0)
    file.discard()

    def full(descriptor: int, start: int, size: int) -> None:
        assert (start, size) == (0, 1_000_000)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        file.write(0, b"x")


def test_a_system_that_writes_less_than_asked_is_asked_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, bytes(data)[:3], at))
    file = file_of(path)
    bring(file, 0, 1, 2)
    file.finish()
    assert path.read_bytes() == CONTENT


# -- checksums ---------------------------------------------------------------------------------------------------------
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html names the algorithms.

STORED = bytes(range(256)) * 40
ALGORITHMS = ("CRC64NVME", "CRC32C", "CRC32", "SHA256", "SHA1")
CHECK = {"CRC64NVME": (0xAE8B14860A799888, 8), "CRC32C": (0xE3069283, 4), "CRC32": (0xCBF43926, 4)}
"""The values of b"123456789" in the catalogue of parametrised CRCs, and their lengths."""


def encoded(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def digest_of(algorithm: str, content: bytes) -> bytes:
    """A digest, by other means."""
    if algorithm == "CRC32":
        return zlib.crc32(content).to_bytes(4, "big")
    return hashlib.new(algorithm.lower(), content, usedforsecurity=False).digest()


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("djl_trtllm.model.remote.s3_download.CHUNK_BYTES", 300)
    (tmp_path / "object").write_bytes(STORED)
    return tmp_path / "object"


def one_part() -> int:
    pytest.fail("asked for the size of parts")


def test_the_stores_cheapest_checksum_counts_and_else_its_etag() -> None:
    head = {f"Checksum{name}": name.lower() for name in ALGORITHMS[::-1]} | {"ETag": '"X0123X"'}
    for algorithm in ALGORITHMS:
        assert claim_of(head, one_part) == Claim(algorithm, algorithm.lower())
        del head[f"Checksum{algorithm}"]
    assert claim_of(head, one_part) == Claim("MD5", "X0123X")
    assert claim_of({"ETag": ""}, one_part) is claim_of({}, one_part) is None
    assert claim_of({"ETag": '"0123-4"'}, lambda: 77) == Claim("MD5", "0123-4", 77)
    assert claim_of({"ChecksumSHA256": "abc=-3"}, lambda: 1024) == Claim("SHA256", "abc=-3", 1024)


def test_the_etag_of_what_is_encrypted_with_a_customers_key_is_no_md5() -> None:
    for kind in ("aws:kms", "aws:kms:dsse"):
        assert claim_of({"ETag": '"0123"', "ServerSideEncryption": kind}, one_part) is None
    assert claim_of({"ETag": '"0123"', "SSECustomerAlgorithm": "AES256"}, one_part) is None
    assert claim_of({"ETag": '"0123"', "ServerSideEncryption": "AES256"}, one_part) == Claim("MD5", "0123")


@pytest.mark.parametrize("algorithm", ["SHA256", "SHA1", "CRC32", "MD5"])
def test_a_file_is_compared_as_a_whole(file: Path, algorithm: str) -> None:
    digest = digest_of(algorithm, STORED)
    claim = Claim(algorithm, digest.hex() if algorithm == "MD5" else encoded(digest))
    assert matches(claim, file), "it is read in several pieces"
    file.write_bytes(STORED[:-1] + b"x")
    assert not matches(claim, file)


@pytest.mark.parametrize("algorithm", CHECK)
def test_cyclic_checksums_have_the_values_of_the_catalogue(file: Path, algorithm: str) -> None:
    value, size = CHECK[algorithm]
    file.write_bytes(b"123456789")
    assert matches(Claim(algorithm, encoded(value.to_bytes(size, "big"))), file)
    file.write_bytes(b"987654321")
    assert not matches(Claim(algorithm, encoded(value.to_bytes(size, "big"))), file)


@pytest.mark.parametrize("size", [len(STORED), 1, 0])
@pytest.mark.parametrize("part_size", [4000, 256, len(STORED), len(STORED) + 1])
@pytest.mark.parametrize("algorithm", ["SHA256", "CRC32", "MD5"])
def test_a_file_is_compared_part_by_part(file: Path, algorithm: str, part_size: int, size: int) -> None:
    file.write_bytes(STORED[:size])
    parts = [digest_of(algorithm, STORED[at : min(at + part_size, size)]) for at in range(0, max(size, 1), part_size)]
    digest = digest_of(algorithm, b"".join(parts))
    value = digest.hex() if algorithm == "MD5" else encoded(digest)
    assert matches(Claim(algorithm, f"{value}-{len(parts)}", part_size), file)
    assert not matches(Claim(algorithm, f"{value}-{len(parts) + 1}", part_size), file)
    assert not matches(Claim(algorithm, f"{value}-{len(parts)}", part_size + 1), file) or len(parts) == 1


@given(pieces=st.lists(st.binary(max_size=50), max_size=5))
def test_the_checksums_of_pieces_join_to_that_of_the_whole(pieces: list[bytes]) -> None:
    whole = crc64(b"".join(pieces))
    assert joined_crc64(iter([(crc64(piece), len(piece)) for piece in pieces])) == encoded(whole.to_bytes(8, "big"))
    continued = 0
    for piece in pieces:
        continued = crc64(piece, continued)
    assert continued == whole
