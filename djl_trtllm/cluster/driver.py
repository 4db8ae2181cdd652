"""The driver of a cluster of this machine, a process that `djl_trtllm.cluster.machine` starts and ends.

`python -m djl_trtllm.cluster.driver SOCKET` reads a `Task` from the socket, starts Ray and serves. It writes
`{"runs": SECONDS}` when the model runs (what its replicas have to end) or `{"error": TEXT}`, and closes its side when
the model is being removed, or when the other side is closed.
"""

import contextlib
import math
import os
import re
import select
import socket
import sys
import time
from typing import Any

import msgspec

from djl_trtllm.cluster.application import ClusterArguments, build, drain_seconds, require_ray
from djl_trtllm.cluster.ray_names import AT_ONCE
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.service.model import preview

_LOOK_SECONDS = 1.0
_LEAST_CPUS = 2
_QUIET = {"log_level": "WARNING"}
"""Ray Serve's own log has warnings only; the replicas' log is the model's."""
_OWN_ERROR = re.compile(r"^djl_trtllm\.errors\.\w+: ", re.MULTILINE)
"""The name of an error of this package in a traceback of Ray's; the replica's own reason follows it."""


class Task(msgspec.Struct, frozen=True):
    """The work of a driver: the arguments of `build`, the application's name and path, and where Serve listens."""

    arguments: dict[str, Any]
    app: str = "default"
    route: str = "/"
    host: str = "127.0.0.1"
    port: int = 8000


def serve(task: Task, channel: socket.socket, ending: contextlib.ExitStack) -> None:
    """Start Ray and Serve and deploy; return when there is nothing to serve. `ending` gets the callbacks that end them.

    Raises DjlTrtllmError.
    """
    ray = require_ray()
    parsed = ClusterArguments.parse(task.arguments)
    # What is wrong with options, model or this machine is said before Ray starts.
    drain = drain_seconds(parsed.resolved())
    planned = preview(parsed.model, os.environ, arguments=as_arguments(parsed.options), offline=True)
    if planned.refusal is not None:
        raise DjlTrtllmError(planned.refusal)
    if planned.plan is not None:
        planned.plan.require_runtime()
    cpus = max(os.cpu_count() or 1, _LEAST_CPUS, math.ceil(parsed.cpus * parsed.most_replicas))
    listen = {"host": task.host, "port": task.port}
    try:
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, logging_level="warning")
        ending.callback(ray.shutdown)
        ending.callback(ray.serve.shutdown)
        ray.serve.start(proxy_location="HeadOnly", http_options=listen, logging_config=_QUIET)
    except Exception as error:  # Ray raises no narrower one
        raise DjlTrtllmError(f"Ray does not start on this machine: {error}") from error
    try:
        ray.serve.run(build(task.arguments), name=task.app, route_prefix=task.route, logging_config=_QUIET)
    except RuntimeError as error:
        raise DjlTrtllmError(f"{task.app} does not start: {_reason(task.app) or error}") from error
    _tell(channel, runs=drain)
    while (found := _found(task.app)) is not None and found.status.value != "DELETING":
        if select.select([channel], [], [], _LOOK_SECONDS)[0]:
            ray.serve.delete(task.app, **AT_ONCE)
            break
    channel.shutdown(socket.SHUT_WR)
    while _found(task.app) is not None:
        time.sleep(_LOOK_SECONDS)


def _found(app: str) -> Any:
    """Serve's status of an application (`ApplicationStatusOverview`); None if there is none of this name."""
    return require_ray().serve.status().applications.get(app)


def _reason(app: str) -> str:
    """Why an application has not started: a replica's own reason, or what Serve says of the application."""
    if (found := _found(app)) is None:
        return ""
    # With Ray 2.60 the application has a sentence only, and the deployment the replica's traceback.
    messages = [*(each.message for each in found.deployments.values()), found.message]
    own = (parts[-1] for message in messages if len(parts := _OWN_ERROR.split(message)) > 1)
    return str(next(own, found.message)).strip()


def _tell(channel: socket.socket, **what: object) -> None:
    channel.sendall(msgspec.json.encode(what) + b"\n")


def main() -> None:
    """Serve what the other side of the socket says."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    with channel.makefile("rb") as lines:
        task = msgspec.json.decode(lines.readline(), type=Task)
    with contextlib.ExitStack() as ending:
        try:
            serve(task, channel, ending)
        except DjlTrtllmError as error:
            _tell(channel, error=str(error))
        finally:
            channel.shutdown(socket.SHUT_WR)  # whatever comes of the end, it has begun


if __name__ == "__main__":
    main()
