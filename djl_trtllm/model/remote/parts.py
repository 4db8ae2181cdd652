"""A file downloaded in parts, in any order, that can be resumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

_SUFFIX = ".arriving"
_JOURNAL = ".parts"


class _Head(msgspec.Struct, frozen=True):
    size: int
    etag: str
    part_size: int


class PartialFile:
    """`path`, of `size` bytes, from parts of `part_size` bytes; `etag` identifies the content.

    A journal beside the partial file lists the complete parts with the CRC-64/NVME of each. If content or size have
    changed, the parts are discarded. Methods are thread-safe. All may raise OSError.
    """

    def __init__(self, path: Path, size: int, etag: str, part_size: int) -> None:
        self.path = path
        self.size = size
        self.arriving = path.with_name(path.name + _SUFFIX)
        self._journal = path.with_name(path.name + _JOURNAL)
        self._head = _Head(size, etag, part_size)
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._crcs: dict[int, int] = {}
        if not self.complete:
            self._resume()
            if not size:
                # An empty file has no parts.
                self._open()

    @property
    def complete(self) -> bool:
        """Whether the file is complete under its final name."""
        return self.path.is_file()

    @property
    def parts(self) -> int:
        return -(-self.size // self._head.part_size)

    @property
    def missing_bytes(self) -> int:
        return sum(end - start for start, end in map(self.part, self.missing()))

    @property
    def missing_blocks(self) -> int:
        """Bytes of disk space that are still needed."""
        if self.complete:
            return 0
        with suppress(FileNotFoundError):
            return max(0, self.size - self.arriving.stat().st_blocks * 512)
        return self.size

    def missing(self) -> list[int]:
        return [] if self.complete else [index for index in range(self.parts) if index not in self._crcs]

    def part(self, index: int) -> tuple[int, int]:
        start = index * self._head.part_size
        return start, min(self.size, start + self._head.part_size)

    def write(self, at: int, data: bytes | memoryview) -> None:
        descriptor = self._open()
        view = memoryview(data)
        while view:
            written = os.pwrite(descriptor, view, at)
            view = view[written:]
            at += written

    def note(self, index: int, crc: int) -> bool:
        """Record a complete part; True if it was the last missing one."""
        with self._lock:
            with self._journal.open("ab") as journal:
                journal.write(msgspec.json.encode([index, crc]) + b"\n")
            self._crcs[index] = crc
            return len(self._crcs) == self.parts

    def crcs(self) -> Iterator[tuple[int, int]]:
        """CRC-64/NVME and length of each part, in order; all parts must be complete."""
        for index in range(self.parts):
            start, end = self.part(index)
            yield self._crcs[index], end - start

    def finish(self) -> None:
        """Rename the file to its final name. All parts must be complete."""
        self.close()
        self.arriving.rename(self.path)
        self._journal.unlink(missing_ok=True)

    def discard(self) -> None:
        self.close()
        self.arriving.unlink(missing_ok=True)
        self._journal.unlink(missing_ok=True)
        self._crcs.clear()

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._descriptor = os.open(self.arriving, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                if self.size:
                    # Reserve all space now, so that a full disk is reported at once.
                    os.posix_fallocate(self._descriptor, 0, self.size)
                if not self._journal.exists():
                    self._journal.write_bytes(msgspec.json.encode(self._head) + b"\n")
            return self._descriptor

    def _resume(self) -> None:
        """Read the journal; remove it if it does not match. An incomplete last line is ignored."""
        try:
            head, *lines = self._journal.read_bytes().split(b"\n")
            if msgspec.json.decode(head, type=_Head) != self._head or not self.arriving.is_file():
                raise ValueError
            for line in lines[:-1]:
                index, crc = msgspec.json.decode(line, type=tuple[int, int])
                self._crcs[index] = crc
        except FileNotFoundError:
            self.arriving.unlink(missing_ok=True)
        except (ValueError, msgspec.DecodeError):
            self.discard()
