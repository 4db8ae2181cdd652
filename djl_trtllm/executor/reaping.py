"""Nothing that an executor host started may outlive it: a worker that does keeps its GPU memory."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator

import psutil

_VARIABLE = "DJL_TRTLLM_EXECUTOR_HOST"
_WAIT_SECONDS = 1.0
"""A process that waits for its GPU may take longer to end than those who wait for an answer should."""


def marked_environment() -> tuple[dict[str, str], str]:
    """This process's environment with a mark that everything started with it inherits, and the mark."""
    mark = secrets.token_hex(16)
    return {**os.environ, _VARIABLE: mark}, mark


def kill_marked(mark: str) -> list[int]:
    """Kill every process that carries the mark and wait until they are gone, a second at most; returns their ids.

    Workers may be in sessions of their own and have other parents than the host, so they are known by their
    environment. Blocks: call it in a thread.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + _WAIT_SECONDS
    # Again until there are none: one may have been starting another.
    while (found := list(_marked(mark))) and time.monotonic() < deadline:
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=max(0.0, deadline - time.monotonic()))
        killed.update(process.pid for process in found)
    return sorted(killed)


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            if process.environ().get(_VARIABLE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or another user's
