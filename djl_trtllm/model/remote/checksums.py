"""Compare a downloaded object with the checksum that S3 has for it."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from awscrt import checksums as crt

_CHUNK = 4 << 20
_ENCRYPTED = ("aws:kms", "aws:kms:dsse")


class Claim(NamedTuple):
    """A checksum: its algorithm, its value as S3 writes it, and the part size it is computed over (0: the whole)."""

    algorithm: str
    value: str
    part_size: int = 0


def claim_of(head: Mapping[str, Any], part_size: Callable[[], int]) -> Claim | None:
    """The best checksum in the response to a HEAD request (with ChecksumMode=ENABLED); None if there is none.

    A checksum over parts needs the part size, which costs a request; `part_size` is called only then. The ETag is an
    MD5 unless the object is encrypted with a customer's key.
    (https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html)
    """
    for algorithm in ("CRC64NVME", "CRC32C", "CRC32", "SHA256", "SHA1"):
        value = str(head.get(f"Checksum{algorithm}", ""))
        if value:
            return Claim(algorithm, value, part_size() if "-" in value else 0)
    encrypted = head.get("ServerSideEncryption") in _ENCRYPTED or "SSECustomerAlgorithm" in head
    etag = str(head.get("ETag", "")).strip('"')
    if encrypted or not etag:
        return None
    return Claim("MD5", etag, part_size() if "-" in etag else 0)


def matches(claim: Claim, path: Path) -> bool:
    """Whether the file has that checksum; reads all of it. Raises OSError."""
    if not claim.part_size:
        return _written(claim.algorithm, _digest(claim.algorithm, _chunks(path))) == claim.value
    size = path.stat().st_size
    starts = range(0, max(size, 1), claim.part_size)
    digests = [_digest(claim.algorithm, _chunks(path, start, claim.part_size)) for start in starts]
    whole = _digest(claim.algorithm, iter([b"".join(digests)]))
    return f"{_written(claim.algorithm, whole)}-{len(digests)}" == claim.value


def crc64(data: bytes | memoryview, before: int = 0) -> int:
    """CRC-64/NVME of `data`, continuing `before`."""
    return int(crt.crc64nvme(data, before))


def joined_crc64(pieces: Iterator[tuple[int, int]]) -> str:
    """The CRC-64/NVME of consecutive pieces, each given as (checksum, length), as S3 writes it."""
    whole = 0
    for value, length in pieces:
        whole = int(crt.combine_crc64nvme(whole, value, length))
    return base64.b64encode(whole.to_bytes(8, "big")).decode()


def _written(algorithm: str, digest: bytes) -> str:
    return digest.hex() if algorithm == "MD5" else base64.b64encode(digest).decode()


def _digest(algorithm: str, chunks: Iterator[bytes]) -> bytes:
    if algorithm in ("MD5", "SHA1", "SHA256"):
        digest = hashlib.new(algorithm, usedforsecurity=False)
        for chunk in chunks:
            digest.update(chunk)
        return digest.digest()
    step = {"CRC64NVME": crt.crc64nvme, "CRC32C": crt.crc32c, "CRC32": zlib.crc32}[algorithm]
    value = 0
    for chunk in chunks:
        value = step(chunk, value)
    return value.to_bytes(8 if algorithm == "CRC64NVME" else 4, "big")


def _chunks(path: Path, start: int = 0, length: int | None = None) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        left = length
        while left is None or left > 0:
            chunk = file.read(_CHUNK if left is None else min(_CHUNK, left))
            if not chunk:
                return
            yield chunk
            if left is not None:
                left -= len(chunk)
