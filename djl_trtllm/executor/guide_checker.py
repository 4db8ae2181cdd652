"""Has guides tried in a process of their own before the engine gets them."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import subprocess
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from djl_trtllm.executor.guide_process import Verdict, decode_verdict, encode_guide
from djl_trtllm.request import Guide

_START_SECONDS = 60.0
_COMPILE_SECONDS = 10.0
_MOST_VERDICTS = 1024
_MOST_OF_A_PROCESS = 256
"""Guides, each of which stays in the process's memory."""

Key = bytes


def key_of(guide: Guide) -> Key:
    """Short, and the same for equal guides."""
    return hashlib.sha256(f"{guide.kind.value}:{guide.value}".encode("utf-8", "surrogatepass")).digest()


class GuideChecker:
    """One guide is tried at a time. Nothing but `poll` waits; the process is started by the first guide.

    `program` is the module that runs (see `guide_process`), with `directory` as its argument.
    """

    def __init__(self, program: str, directory: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._program = program
        self._directory = directory
        self._clock = clock
        self._verdicts: OrderedDict[Key, Verdict] = OrderedDict()
        self._waiting: deque[tuple[Key, Guide]] = deque()
        self._current: Key | None = None
        self._deadline = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._tried = 0

    def check(self, key: Key, guide: Guide) -> None:
        """Have a guide tried, unless it was, or is waiting."""
        if key not in self._verdicts and key != self._current and all(key != waiting for waiting, _ in self._waiting):
            self._waiting.append((key, guide))
            self._advance()

    def verdict(self, key: Key) -> Verdict | None:
        """None while it is not known."""
        found = self._verdicts.get(key)
        if found is not None:
            self._verdicts.move_to_end(key)
        return found

    def poll(self, seconds: float) -> None:
        """Take what the process has found, waiting up to `seconds` for it."""
        if self._current is None:
            return
        try:
            if self._connection.poll(seconds):
                self._found(decode_verdict(self._connection.recv_bytes()))
            elif self._clock() > self._deadline:
                self.close()
                self._found(Verdict(f"it takes longer than {_COMPILE_SECONDS:g} seconds to compile"))
        except (EOFError, OSError):
            status = self.close()
            self._found(Verdict(f"it is too large or nested too deep: its compiler ended with status {status}"))
        self._advance()

    @property
    def idle(self) -> bool:
        return self._current is None

    def close(self) -> int | None:
        """End the process; its status."""
        process, self._process, self._tried = self._process, None, 0
        if process is None:
            return None
        with contextlib.suppress(OSError):
            self._connection.close()
        process.kill()
        return process.wait()

    def _found(self, verdict: Verdict) -> None:
        assert self._current is not None
        self._verdicts[self._current] = verdict
        self._current = None
        self._tried += 1
        if len(self._verdicts) > _MOST_VERDICTS:
            self._verdicts.popitem(last=False)
        if self._tried >= _MOST_OF_A_PROCESS:
            self.close()

    def _advance(self) -> None:
        if self._current is not None or not self._waiting:
            return
        self._current, guide = self._waiting.popleft()
        started = self._process is None
        if started:
            self._start()
        self._deadline = self._clock() + _COMPILE_SECONDS + (_START_SECONDS if started else 0.0)
        with contextlib.suppress(OSError):  # it has ended: poll() sees that
            self._connection.send_bytes(encode_guide(guide))

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._program, str(fd), self._directory],
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
