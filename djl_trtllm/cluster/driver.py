"""The driver of a cluster of this machine, as a program: `python -m djl_trtllm.cluster.driver SOCKET`.

It reads what to serve from the socket, writes `{"runs": SECONDS}` there when the model runs (what its replicas have to
end) or `{"error": TEXT}`, and closes its side when the model is being removed, or when the other side is closed.
`djl_trtllm.cluster.machine` starts and ends it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from djl_trtllm.cluster.application import ClusterArguments, drain_seconds, require_ray
from djl_trtllm.cluster.control import Place, as_current_cluster, run_application
from djl_trtllm.errors import DjlTrtllmError

_LOOK_SECONDS = 1.0
_LEAST_CPUS = 2
_QUIET = {"log_level": "WARNING"}
"""Ray Serve's own log has warnings only; the replicas' log is the model's."""


def serve(task: Mapping[str, Any], channel: socket.socket, ending: contextlib.ExitStack) -> None:
    """Start Ray and Serve and deploy; return when there is nothing to serve. What ends them is given to `ending`.

    Raises DjlTrtllmError.
    """
    ray = require_ray()
    parsed = ClusterArguments.parse(task["arguments"])
    drain = drain_seconds(parsed.resolved())  # what is wrong with the options is said before Ray starts
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
        if select.select([channel], [], [], _LOOK_SECONDS)[0]:
            serve.delete(app, _blocking=False)
            break
    channel.shutdown(socket.SHUT_WR)
    while _status(app) is not None:
        time.sleep(_LOOK_SECONDS)


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
