"""Starts the servers that the benchmarks measure."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def started(arguments: list[str], port: int, path: str = "/ping", **environ: str) -> Iterator[psutil.Process]:
    """Run a Python server until the block ends; entered once `path` answers 200."""
    with started_command([sys.executable, *arguments], port, path, **environ) as process:
        yield process


@contextlib.contextmanager
def started_command(arguments: list[str], port: int, path: str = "/ping", **environ: str) -> Iterator[psutil.Process]:
    """Run any server until the block ends; entered once `path` answers 200."""
    process = subprocess.Popen(arguments, env={**os.environ, **environ})
    try:
        deadline = time.monotonic() + 300
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{arguments} did not start (status {process.returncode})")
            with contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2)
                break
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ours(model: Path, port: int) -> list[str]:
    """The command line of `djl-trtllm serve`."""
    return [
        "-m",
        "djl_trtllm.cli",
        "serve",
        str(model),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--log-level",
        "warning",
    ]


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of the process itself (its executor host is not part of it), user and system."""
    times = process.cpu_times()
    return float(times.user + times.system)
