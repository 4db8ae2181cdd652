"""The applications of a Ray cluster that runs: deployed, looked at and removed from the command line.

As a program, `python -m djl_trtllm.cluster.control SOCKET`, it is the driver of a cluster of this machine, which
`djl_trtllm.cluster.machine` starts and ends. It reads what to serve from the socket, writes `{"runs": SECONDS}` there
when the model runs (what its replicas have to end) or `{"error": TEXT}`, and closes its side when the model is being
removed, or when the other side is closed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from djl_trtllm.cluster.application import ClusterArguments, build, drain_seconds, require_ray
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service.model import preview

_CONNECT_SECONDS = 10.0
_DELETE_SECONDS = 30.0
_LOOK_SECONDS = 0.1
_OWN_ERROR = re.compile(r"^djl_trtllm\.errors\.\w+: ", re.MULTILINE)
"""After this, a traceback of Ray's has the replica's own reason."""


@dataclass(frozen=True)
class Place:
    """An application's name in Serve, and the path below which it answers."""

    app: str = "default"
    route: str = "/"


@dataclass(frozen=True)
class AppStatus:
    """An application of the cluster: `state` and `message` are Serve's, `replicas` are numbers by their state.

    Where an application has several deployments, a state has the deployment's name before it: `model RUNNING`.
    """

    name: str
    state: str
    message: str
    replicas: Mapping[str, int]


def deploy(arguments: Mapping[str, Any], place: Place, address: str) -> None:
    """Deploy a model to the cluster at `address`, or another version of it; returns when it runs.

    Raises DjlTrtllmError if there is no such cluster, or the model does not start.
    """
    with _connected(address):
        run_application(arguments, place)


def run_application(arguments: Mapping[str, Any], place: Place, **options: Any) -> None:
    """Deploy to the cluster that this process is connected to. Raises DjlTrtllmError if the model does not start."""
    from ray import serve

    application = build(arguments)
    try:
        serve.run(application, name=place.app, route_prefix=place.route, **options)
    except RuntimeError as error:
        found = serve.status().applications.get(place.app)
        said = found.message if found else str(error)
        raise DjlTrtllmError(f"{place.app} does not start: {_OWN_ERROR.split(said)[-1].strip()}") from error


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
        # Serve sends a message and waits for nothing: disconnecting at once may lose it.
        serve.delete(app, _blocking=False)
        deadline = time.monotonic() + _DELETE_SECONDS
        while (found := serve.status().applications.get(app)) is not None and found.status.value != "DELETING":
            if time.monotonic() > deadline:
                raise DjlTrtllmError(f"the cluster has not begun to remove {app} after {_DELETE_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)


def _app_status(name: str, found: Any) -> AppStatus:
    replicas: dict[str, int] = {}
    for deployment, its in found.deployments.items():
        of = f"{deployment} " if len(found.deployments) > 1 else ""
        for state, count in its.replica_states.items():
            replicas[f"{of}{state}"] = count
    return AppStatus(name, found.status.value, found.message, replicas)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    ray = require_ray()
    try:
        _require_listener(address)
        ray.init(address=address, logging_level="error", log_to_driver=False)
    except (OSError, RuntimeError, ValueError) as error:
        raise DjlTrtllmError(
            f"no Ray cluster at {address} ({error}): start one with `djl-trtllm cluster up MODEL` or `ray start "
            "--head`, or name one with --address or RAY_ADDRESS"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def as_current_cluster(address: str) -> Iterator[None]:
    """Within the block, the address `auto` means this cluster. `ray start` writes the file too, `ray.init` does not."""
    file = current_cluster()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(address)
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            if file.read_text() == address:
                file.unlink()


def current_cluster() -> Path:
    """The file with the address of the cluster that was started last in Ray's folder."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108 (Ray's own folder)
    return Path(folder, "ray", "ray_current_cluster")


def _require_listener(address: str) -> None:
    """Raises OSError if nobody listens at the address, or at that of the current cluster: Ray would try for minutes.

    For `auto`, Ray itself takes the current cluster where several run. Named by its address, it would not be given the
    token that Ray makes for clusters of a machine.
    """
    if address == "auto" and current_cluster().is_file():
        address = current_cluster().read_text().strip()
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()


_DRIVER_LOOK_SECONDS = 1.0
_LEAST_CPUS = 2
_QUIET = {"log_level": "WARNING"}
"""Ray Serve's own log has warnings only; the replicas' log is the model's."""


def serve(task: Mapping[str, Any], channel: socket.socket, ending: contextlib.ExitStack) -> None:
    """Start Ray and Serve and deploy; return when there is nothing to serve. `ending` gets the callbacks that end them.

    Raises DjlTrtllmError.
    """
    ray = require_ray()
    parsed = ClusterArguments.parse(task["arguments"])
    # What is wrong with options, model or this machine is said before Ray starts.
    drain = drain_seconds(parsed.resolved())
    planned = preview(parsed.model, os.environ, arguments=as_arguments(parsed.options), offline=True)
    if planned.refusal is not None:
        raise DjlTrtllmError(planned.refusal)
    try:
        started = ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, _LEAST_CPUS, math.ceil(parsed.cpus_at_most)),
            include_dashboard=False,
            logging_level="warning",
        )
    except Exception as error:  # Ray raises no narrower one
        raise DjlTrtllmError(f"Ray does not start on this machine: {error}") from error
    ending.callback(ray.shutdown)
    ending.callback(ray.serve.shutdown)
    ending.enter_context(as_current_cluster(started.address_info["gcs_address"]))
    _start_serve(task["host"], task["port"])
    run_application(task["arguments"], Place(task["app"], task["route"]), logging_config=_QUIET)
    _tell(channel, runs=drain)
    _remove_when_asked(task["app"], channel)


def _start_serve(host: str, port: int) -> None:
    from ray import serve

    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port}, logging_config=_QUIET)
    except Exception as error:
        raise DjlTrtllmError(f"Ray Serve does not start on this machine: {error}") from error


def _remove_when_asked(app: str, channel: socket.socket) -> None:
    """Return when the application is gone. It is removed when the other side of the channel is closed."""
    from ray import serve

    while _status(app) not in (None, "DELETING"):
        if select.select([channel], [], [], _DRIVER_LOOK_SECONDS)[0]:
            serve.delete(app, _blocking=False)
            break
    channel.shutdown(socket.SHUT_WR)
    while _status(app) is not None:
        time.sleep(_DRIVER_LOOK_SECONDS)


def _status(app: str) -> str | None:
    from ray import serve

    found = serve.status().applications.get(app)
    return None if found is None else str(found.status.value)


def _tell(channel: socket.socket, **what: object) -> None:
    channel.sendall(json.dumps(what).encode() + b"\n")


def main() -> None:
    """Serve what the other side of the socket says."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        task = json.loads(lines.readline())
    with contextlib.ExitStack() as ending:
        try:
            serve(task, channel, ending)
        except DjlTrtllmError as error:
            _tell(channel, error=str(error))
        finally:
            channel.shutdown(socket.SHUT_WR)  # whatever comes of the end, it has begun


if __name__ == "__main__":
    main()
