"""Progress of downloads, uploads and other work that takes long: lines now and then, or a display on a terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from filelock import FileLock, Timeout

_REPORT_EVERY_SECONDS = 5.0
_RATE_OVER_SECONDS = 10.0
_FIRST_WAIT_SECONDS = 0.5
_NEXT_WAITS_SECONDS = 10.0


class Display(Protocol):
    """Shows what is under way; called from any thread."""

    def show(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of this are done; `total` 0: it has no size, only a duration."""

    def end(self, what: str) -> None:
        """This has ended."""


_displays: list[Display] = []


@contextmanager
def shown_on(display: Display) -> Iterator[None]:
    """Show all progress of this process there instead of in lines now and then."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)


@contextmanager
def under_way(what: str) -> Iterator[None]:
    """Show that this takes time, where there is a display."""
    for display in _displays[-1:]:
        display.show(what, 0, 0)
    try:
        yield
    finally:
        for display in _displays[-1:]:
            display.end(what)


class ProgressMeter:
    """Counts bytes from any thread; every few seconds calls `progress` with the amount, the rate and the time left.

    As a context it ends with a line about the whole, unless an error ends it.
    """

    def __init__(self, what: str, total: int, progress: Callable[[str], None]) -> None:
        self.done = 0
        self._what = what
        self._total = total
        self._progress = progress
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._reported = self._started
        self._window = (self._started, 0)

    def add(self, count: int) -> None:
        """Add `count` bytes; negative when a piece has to be fetched again."""
        with self._lock:
            self.done += count
            for display in _displays[-1:]:
                display.show(self._what, self.done, self._total)
                return
            now = time.monotonic()
            if now - self._reported < _REPORT_EVERY_SECONDS:
                return
            self._reported = now
            line = self._line(now)
        self._progress(line)

    def __enter__(self) -> ProgressMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for display in _displays[-1:]:
            display.end(self._what)
        if kind is None:
            self.finish()

    def finish(self) -> None:
        seconds = max(time.monotonic() - self._started, 1e-3)
        self._progress(
            f"{self._what}: {format_bytes(self.done)} in {seconds:.1f} s ({format_bytes(self.done / seconds)}/s)"
        )

    def _line(self, now: float) -> str:
        since, before = self._window
        rate = (self.done - before) / max(now - since, 1e-3)
        if now - since > _RATE_OVER_SECONDS:
            self._window = (now, self.done)
        left = f", {(self._total - self.done) / rate:.0f} s left" if rate > 0 else ""
        return f"{self._what}: {format_bytes(self.done)} of {format_bytes(self._total)}, {format_bytes(rate)}/s{left}"


def acquire(lock: FileLock, report: Callable[[float], None]) -> AbstractContextManager[object]:
    """Acquire the lock of a file. While another process holds it, `report` gets the seconds waited, now and then."""
    started = time.monotonic()
    wait = _FIRST_WAIT_SECONDS
    while True:
        try:
            return lock.acquire(timeout=wait)
        except Timeout:
            report(time.monotonic() - started)
            wait = _NEXT_WAITS_SECONDS


def format_bytes(count: float) -> str:
    """Bytes for a reader: `1.5 GB`, powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
