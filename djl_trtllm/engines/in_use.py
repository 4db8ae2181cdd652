"""Marks that a process is using a file. The system removes them when the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_held: dict[Path, int] = {}
_lock = threading.Lock()


def hold(mark: Path) -> None:
    """Hold the mark until this process ends, shared with other processes, and set its modification time to now.

    If the file cannot be written, no process can remove what it marks, and nothing is held. Waits while another process
    removes it. Raises OSError.
    """
    with _lock:
        if mark not in _held:
            try:
                descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except OSError as error:
                if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                    return
                raise
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            _held[mark] = descriptor
        os.utime(_held[mark])


@contextmanager
def nobody(mark: Path) -> Iterator[bool]:
    """Whether no process holds the mark; if so, none can take it while the block runs."""
    with _lock:
        if mark in _held:
            yield False
            return
    descriptor = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
