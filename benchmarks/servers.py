"""The servers that the benchmarks measure: ours by the tests' harness, others by their command."""

from __future__ import annotations

import contextlib
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.server import Server, free_port, running, serving

_START_SECONDS = 900
"""Importing torch takes minutes on a busy machine."""

TICK = 1 / os.sysconf("SC_CLK_TCK")
__all__ = ["TICK", "Server", "cpu_seconds", "free_port", "of_the_shell", "running", "serving", "started"]


def of_the_shell(**options: str) -> dict[str, str]:
    """The shell's environment and `options`. Alone, the harness keeps the shell's options and engine cache out."""
    return {"DJL_CACHE_DIR": str(Path.home() / ".cache"), **os.environ, **options}


@contextlib.contextmanager
def started(arguments: list[str], port: int, ready: str = "/ping", **environ: str) -> Iterator[psutil.Process]:
    """Run any server until the block ends; entered once the path `ready` answers 200. Its log goes to stderr."""
    process = psutil.Popen(arguments, env={**os.environ, **environ}, stdout=sys.stderr)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments} did not start (status {process.returncode})")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{ready}", timeout=2)
                break
            time.sleep(0.1)
        yield process
    finally:
        _end(process)


def _end(process: psutil.Popen) -> None:
    """End a server with all that it has started: LitServe and DJL Serving leave their workers behind."""
    processes = [process]
    with contextlib.suppress(psutil.NoSuchProcess):
        processes += process.children(recursive=True)
        process.terminate()
    _, left = psutil.wait_procs(processes[:1], timeout=40)
    _, others = psutil.wait_procs(processes[1:], timeout=5)
    for each in (*left, *others):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
            each.wait()


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of the process itself (its engine process is not part of it), user and system, in whole ticks."""
    times = process.cpu_times()
    return float(times.user + times.system)
