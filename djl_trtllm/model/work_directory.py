"""Directories that a process works in. The system says whether it still does: a lock ends with its process."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY_PREFIX = "djl-trtllm-work-"


@contextmanager
def temporary_directory() -> Iterator[str]:
    """An empty directory in the system's folder for such, removed after the block."""
    with (
        tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, ignore_cleanup_errors=True) as path,
        marked(Path(path)),
    ):
        yield path


@contextmanager
def marked(path: Path) -> Iterator[None]:
    """Lock a directory or file while the block runs. The system unlocks it when the process ends, however it ends."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with suppress(OSError):  # not every file system has locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        yield
    finally:
        os.close(descriptor)


def is_abandoned(path: Path) -> bool:
    """Whether no process has `marked` the directory or file; False if that is unknown."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
