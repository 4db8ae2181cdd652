"""A cluster of this machine alone. Ray is in a process of its own, so that the end needs nothing of it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from djl_trtllm.cluster.control import Place
from djl_trtllm.cluster.environment import environment_of_machine
from djl_trtllm.errors import DjlTrtllmError

logger = logging.getLogger(__name__)

_SERVE_AND_RAY_SECONDS = 60.0
"""How long Serve and Ray may take to end once the replicas have; Serve alone takes up to 30."""
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_DRIVER = (sys.executable, "-m", "djl_trtllm.cluster.driver")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class _Stopped(Exception):
    """SIGINT or SIGTERM came."""


def serve_here(arguments: Mapping[str, Any], place: Place, host: str, port: int, ready: Callable[[], None]) -> None:
    """A cluster of this machine alone, with a model on it. Calls `ready` when the model runs.

    It lives until SIGINT or SIGTERM, or until the application is deleted. Then the replicas have the time of their
    `shutdown_timeout`, and Ray a minute; what is left of them is killed, and at once if another signal comes or the
    model does not run yet. Raises DjlTrtllmError if the cluster or the model does not start, or Ray ends.
    """
    task = {"arguments": arguments, "app": place.app, "route": place.route, "host": host, "port": port}
    error = None
    with (
        _on_signals(signal.SIG_IGN),
        _adopting_orphans(),
        tempfile.TemporaryDirectory(prefix="djl-trtllm-", ignore_cleanup_errors=True) as folder,
    ):
        environ = environment_of_machine(os.environ, Path(folder))
        spared = _below()
        try:
            with _on_signals(_stop):
                error = _follow(task, environ, ready)
                # HAProxy is no process of Ray's, and may outlive the one that has started it.
                psutil.wait_procs(_below() - spared, _END_SECONDS)
        except _Stopped:
            pass
        finally:
            if killed := _kill_below(spared):
                logger.warning("these processes had not ended and were killed: %s", ", ".join(killed))
    if error is not None:
        raise DjlTrtllmError(error)


def _follow(task: Mapping[str, Any], environ: Mapping[str, str], ready: Callable[[], None]) -> str | None:
    """Start the driver, and return when it has ended, or should have; what went wrong. Raises _Stopped."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            driver = subprocess.Popen(
                [*_DRIVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for this process
            )
        ours.sendall(json.dumps(task).encode() + b"\n")
        error: str | None = None
        drain: float | None = None
        try:
            for line in ours.makefile("rb"):
                message = json.loads(line)
                if "error" in message:
                    error = message["error"]
                else:
                    drain = message["runs"]
                    ready()
        except _Stopped:
            if drain is None:  # nothing runs that could be lost
                raise
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait((drain or 0.0) + _SERVE_AND_RAY_SECONDS)
        if error is None and driver.returncode:
            error = f"the process that runs Ray has ended with status {driver.returncode}"
        return error


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Processes below this one whose parent has ended stay below it, on Linux. They are reaped when all end."""
    if sys.platform != "linux":
        yield
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _below() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _kill_below(spared: set[psutil.Process]) -> list[str]:
    """Kill all processes below this one but these, and those that they start meanwhile; what they were."""
    killed: dict[psutil.Process, str] = {}
    deadline = time.monotonic() + _END_SECONDS
    while (left := _below() - spared) and time.monotonic() < deadline:
        # All names first: the kernel kills some of Ray's processes with the one that has started them.
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    title = (process.cmdline() or [process.name()])[0]
                    killed.setdefault(process, f"{Path(title).name} ({process.pid})")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, _LOOK_SECONDS)
    return list(killed.values())


def _stop(number: int, frame: object) -> None:
    raise _Stopped


@contextlib.contextmanager
def _on_signals(handler: Any) -> Iterator[None]:
    """Handle SIGINT and SIGTERM so, in the place of what the command line does at them."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
