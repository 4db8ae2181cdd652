"""Processes, threads and signals of tests: waiting, work in the background, crashed workers."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import pytest
from typing_extensions import Self

PATIENCE = 240.0
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
    """The processes that still live after `timeout` seconds. A zombie, which may stay one for long, does not live."""
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


# -- A thread that runs during a block ---------------------------------------------------------------------------------


class InBackground(ABC):
    """Runs `_run` in a thread from the beginning of the block; `_end` is set at the end of it."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @abstractmethod
    def _run(self) -> None: ...

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()


# -- the alternate signal stack of the calling thread: sigaltstack(2) --------------------------------------------------


class SignalStack(ctypes.Structure):
    """`stack_t`."""

    _fields_ = (("pointer", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


_sigaltstack = ctypes.CDLL(None, use_errno=True).sigaltstack


def current() -> SignalStack:
    """What this thread's signal handlers run on."""
    stack = SignalStack()
    _sigaltstack(None, ctypes.byref(stack))
    return stack


def put(stack: SignalStack) -> None:
    """Let this thread's signal handlers run on `stack`, which `current` gave."""
    if _sigaltstack(ctypes.byref(stack), None):
        raise OSError(ctypes.get_errno(), "sigaltstack")


# A test process of pytest-xdist that crashed ends the run with status 2, as an interrupt does: its tests were not run.
# xdist itself would end with 1, the status of tests that failed, which `.ci/run` runs again.

_CRASHED = pytest.StashKey[bool]()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        node.config.stash[_CRASHED] = True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.stash.get(_CRASHED, False):
        session.exitstatus = pytest.ExitCode.INTERRUPTED
