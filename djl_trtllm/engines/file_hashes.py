"""SHA-256 of files, cached for large files that have not changed since."""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
from pathlib import Path

import msgspec

log = logging.getLogger(__name__)

_CHUNK_BYTES = 4 << 20
_WORTH_REMEMBERING_BYTES = 64 << 20
_SETTLED_SECONDS = 2.0


class _Remembered(msgspec.Struct, frozen=True):
    state: list[int]
    sha256: str


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file, read in chunks (constant memory). Raises OSError."""
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


class FileHashes:
    """Hashes of files. Those of 64 MB and more are cached in the folder `store`, if there is one.

    Hashing reads every byte: 0.3 GB per CPU-second without SHA instructions, measured on a 2.5 GHz Xeon, or a minute
    for 16 GB. A file is unchanged if device, inode, size, modification and change time are unchanged.
    """

    def __init__(self, store: Path | None = None) -> None:
        self.store = store

    def sha256(self, path: Path) -> str:
        """Hex SHA-256 of a file. Raises OSError."""
        state = _state(path)
        if self.store is None or path.stat().st_size < _WORTH_REMEMBERING_BYTES:
            return file_sha256(path)
        note = self.store / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
        remembered = _read(note)
        if remembered is not None and remembered.state == state:
            return remembered.sha256
        sha256 = file_sha256(path)
        # A file touched just now may be written once more with the same times.
        settled = time.time() - path.stat().st_mtime > _SETTLED_SECONDS
        if settled and _state(path) == state:
            _write(note, _Remembered(state, sha256))
        return sha256


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _read(note: Path) -> _Remembered | None:
    try:
        return msgspec.json.decode(note.read_bytes(), type=_Remembered)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.info("the cached hash %s is not used: %s", note, error)
        return None


def _write(note: Path, remembered: _Remembered) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_name(f".{note.name}.{secrets.token_hex(4)}")
        temporary.write_bytes(msgspec.json.encode(remembered))
        temporary.replace(note)
    except OSError as error:
        log.info("cannot cache the hash of a large file, it is computed at every start: %s", error)
