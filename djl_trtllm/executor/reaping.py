"""Nothing of an engine process may outlive it: a leftover worker keeps its GPU memory, and its files fill the disk."""

from __future__ import annotations

import contextlib
import getpass
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from djl_trtllm.model.work_directory import ENGINE_PREFIX, marked

_VARIABLE = "DJL_TRTLLM_ENGINE_PROCESS"
_WAIT_SECONDS = 1.0
"""A process that waits for its GPU may take longer to end than a client should wait for an error."""


class ProcessEnvironment:
    """The environment of one engine process: a mark that all its children inherit, and a TMPDIR of its own.

    Workspaces and sockets of TensorRT-LLM and MPI go there; they are removed by their owners only if these end well.
    """

    def __init__(self) -> None:
        self._mark = secrets.token_hex(16)
        self._lock = contextlib.ExitStack()
        shared = Path(tempfile.gettempdir())
        # Sockets are made below it, and the path of a socket has 107 bytes.
        self.temporary = shared / f"{ENGINE_PREFIX}{self._mark[:12]}"
        self.variables = {**os.environ, _VARIABLE: self._mark, "TMPDIR": str(self.temporary)}
        # Compiled kernels are for the next process too.
        with contextlib.suppress(OSError, KeyError):  # a user id without a name
            self.variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(shared / f"torchinductor_{getpass.getuser()}"))

    def prepare(self) -> None:
        """Make the folder for temporary files, locked until `clear` or the end of this process. Raises OSError."""
        self.temporary.mkdir(mode=0o700)
        self._lock.enter_context(marked(self.temporary))

    def clear(self) -> list[int]:
        """Kill every process that carries the mark and wait until they are gone, a second at most; returns their ids.

        Workers may be in sessions of their own and have other parents than the engine process, so they are found by
        their environment. Then the temporary files are removed. Blocks: call it in a thread.
        """
        killed: set[int] = set()
        deadline = time.monotonic() + _WAIT_SECONDS
        # Again until there are none: one may have been starting another.
        while found := list(_marked(self._mark)):
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(found, timeout=max(0.0, deadline - time.monotonic()))
            killed.update(process.pid for process in found)
            if time.monotonic() >= deadline:
                break
        shutil.rmtree(self.temporary, ignore_errors=True)
        self._lock.close()
        return sorted(killed)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process and its children, in bytes; 0 if it is gone."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(one.memory_info().rss)
    return total


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or another user's
            if process.environ().get(_VARIABLE) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
