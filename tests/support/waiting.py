"""Waiting for what another process does, without a busy loop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable

import psutil

PATIENCE = 60.0
"""Seconds. It ends a test that would hang, and measures nothing: machines may be ten times slower."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


def wait_until(condition: Callable[[], bool], timeout: float = PATIENCE, what: str = "") -> None:
    """Poll until `condition` holds; AssertionError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    pause = _FIRST_PAUSE
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout:g} s: {what or condition}"
        time.sleep(pause)
        pause = min(pause * 1.3, _LONGEST_PAUSE)


def survivors(processes: Iterable[psutil.Process], timeout: float = PATIENCE / 2) -> list[psutil.Process]:
    """Those that still live after `timeout` seconds. A zombie does not: whose parent is gone may stay one for long."""
    alive = list(processes)

    def all_ended() -> bool:
        alive[:] = [process for process in alive if _lives(process)]
        return not alive

    with contextlib.suppress(AssertionError):
        wait_until(all_ended, timeout)
    return alive


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
