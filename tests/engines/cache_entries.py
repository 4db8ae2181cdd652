"""Entries of an engine cache for tests, and marks as other processes hold them."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from djl_trtllm.engines.manifest import Manifest
from djl_trtllm.engines.staging import staged

KEY = "openvino-0123456789abcdef"


def seal(directory: Path) -> None:
    """Write the manifest of what is in a directory."""
    Manifest.of(directory, backend="openvino", checkpoint="x", options={}, versions={}, platform="x86_64").write(
        directory
    )


def build(out: Path, *, size: int = 10_000) -> None:
    """Write a whole engine of one file."""
    with staged(out) as partial:
        (partial / "model.bin").write_bytes(bytes(size))
        seal(partial)


class Builder:
    """Builds at once and counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, out: Path) -> None:
        self.calls += 1
        build(out)


@contextmanager
def locked(path: Path, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock on a file as another process would."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def is_free(path: Path) -> bool:
    """Whether another process could lock a file."""
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True
