"""A Ray cluster of several raylets on this machine, with models on it, in processes that end with it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest
from packaging.version import Version

from djl_trtllm.cluster import build
from djl_trtllm.cluster.machine import files_of_haproxy
from djl_trtllm.cluster.ray_names import NODES, ROUTER
from tests.support.processes import survivors, wait_until
from tests.support.server import Reachable, environment, free_port

if __name__ == "__main__":  # Ray takes half a second; only the process of a cluster needs it
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

_ROOT = Path(__file__).parents[2]
_DRAIN_SECONDS = 8
"""How long a replica that ends is still reachable; Ray's default is 30."""
_FIRST_PORT, _PORTS = 30000, 100
"""Ray's first port of replicas, and how many a cluster gets of the thousand that Ray uses: those of replicas that have
ended are not used again for an hour, and without a port no replica starts."""
_ATTEMPTS = 5
_STATUS_SECONDS = 0.4
"""Between two questions for the replicas' states: each costs the driver and Ray's controller processor time."""
_CALL_SECONDS = 1200.0
"""Against a driver that hangs. A deployment took more than 300 s on two cores at a load of 60."""
_REPLICA = re.compile(r"ServeReplica:(?P<app>[^:]+):(?P<name>[\w-]+)")
"""The title of a replica's process. While Ray calls one of its methods, the method's name follows."""


def needs_ray() -> None:
    """Skip the test where Ray is not installed."""
    pytest.importorskip(
        "ray", reason="Ray is not installed: it is in the extra `ray`, and in `test`", exc_type=ImportError
    )


class RayCluster(Reachable):
    """`nodes` for replicas beside a head. `direct`: clients reach the replicas through HAProxy, else by Ray's proxy."""

    def __init__(
        self, nodes: int = 1, *, cpus: int = 1, direct: bool = True, environ: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(free_port())
        self._command = ("-m", "tests.support.ray_cluster", str(self.port), str(cpus), str(nodes))
        self._variables = (dict(NODES) if direct else {}) | dict(environ or {})
        self._seen: set[psutil.Process] = set()

    def __enter__(self) -> RayCluster:
        for attempt in range(1, _ATTEMPTS + 1):
            self._start()
            try:
                self._answer("start")
                break
            except RuntimeError:
                self.close()
                # A raylet has 30 seconds to start, whatever the machine has to do.
                if attempt == _ATTEMPTS:
                    raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            print("-- log of the cluster", self.log[-8000:], sep="\n")
        self.http.close()
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="c", dir="/tmp")  # short: sockets are below it
        folder = Path(self._folder.name)
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = psutil.Popen(
                [sys.executable, *self._command],
                cwd=_ROOT,
                env=environment(folder / "cache", **variables(folder), **self._variables),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def close(self) -> None:
        """End it. AssertionError: a process of it is left."""
        self.descendants()
        try:
            self.process.stdin.close()
            self.process.wait(_CALL_SECONDS)
        finally:
            if self.process.poll() is None:
                self.process.kill()
            left = survivors(self._seen)
            for process in left:
                process.kill()
            self._folder.cleanup()
        assert not left, f"outlived its cluster: {left}"

    @property
    def has_routers(self) -> bool:
        """Whether HAProxy asks routers of this project."""
        return Version(importlib.metadata.version("ray")) >= Version("2.58")

    @property
    def log(self) -> str:
        """What Ray and the driver have written."""
        return self._log.read_text(errors="replace")

    # -- calls of the driver -------------------------------------------------------------------------------------------

    def call(self, name: str, *arguments: Any) -> Any:
        """What the driver's method returns. RuntimeError: its error."""
        self.process.stdin.write(json.dumps([name, arguments]).encode() + b"\n")
        self.process.stdin.flush()
        return self._answer(name)

    def _answer(self, name: str) -> Any:
        hung = threading.Timer(_CALL_SECONDS, self.process.kill)
        hung.start()
        try:
            line = self.process.stdout.readline()
        finally:
            hung.cancel()
        self.descendants()
        if not line:
            raise RuntimeError(f"{name}: the driver ended: {self.log[-8000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer["result"]

    def deploy(self, model: Path | str, *, app: str = "default", route: str = "/", **arguments: Any) -> None:
        """Deploy a model with these arguments of `build`, or another version of it, and wait until it runs."""
        self.call("deploy", {"model": str(model), "cpus": 0.2, **arguments}, app, route)

    def wait_for_replicas(self, count: int, app: str = "default", timeout: float = 180.0) -> None:
        """Wait until this number runs, and none starts or stops, nor does a router."""

        def complete() -> bool:
            found = self.call("status")[app]["replicas"]
            running = sum(states.get("RUNNING", 0) for name, states in found.items() if not name.endswith(ROUTER))
            if running == count and all({*states} == {"RUNNING"} for states in found.values()):
                return True
            time.sleep(_STATUS_SECONDS)
            return False

        wait_until(complete, timeout, f"{count} replicas")

    # -- processes -----------------------------------------------------------------------------------------------------

    def descendants(self) -> list[psutil.Process]:
        """All processes of the cluster."""
        if self.process.poll() is not None:
            return []
        children: list[psutil.Process] = self.process.children(recursive=True)
        self._seen.update(children)
        return children

    def replicas(self, app: str | None = None) -> list[psutil.Process]:
        """The processes of an application's replicas, or of all, in the order of their start; routers are none."""
        titles = ((process, _REPLICA.search(command(process))) for process in self.descendants())
        found = [
            process
            for process, title in titles
            if title is not None and not title["name"].endswith(ROUTER) and app in (None, title["app"])
        ]
        return sorted(found, key=lambda process: process.create_time())


def command(process: psutil.Process) -> str:
    """Its command line; empty if it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def variables(folder: Path) -> dict[str, str]:
    """What lets several clusters live beside each other: Serve's files and ports are the same for all by default.

    Clusters with the same port of a fallback proxy share it, and get each other's requests.
    """
    replicas = _FIRST_PORT + _PORTS * random.SystemRandom().randrange(1000 // _PORTS)
    return {
        "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_num_prestart_python_workers": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_worker_prestart": "0",
        # Raylets and proxies share this machine with other tests.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "60",
        **files_of_haproxy(folder),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(replicas),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(replicas + _PORTS),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(_DRAIN_SECONDS),
    }


# The driver of a Ray cluster on this machine, as a program: `python -m tests.support.ray_cluster PORT CPUS NODES`. A
# line of its input is a call, `[name, arguments]` in JSON; a line of its output is what the call returned, or its
# error. It ends, with the cluster, when its input does. `tests.support.ray_cluster` is its client.


class Driver:
    """The cluster: a head without CPUs, which has the proxy, and nodes for the replicas. Public methods are calls."""

    def __init__(self, port: int, cpus: int, nodes: int) -> None:
        self._cpus = cpus
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": self._folder.name}
        # Ray notes the address of the newest cluster in its usual folder, and does not make it.
        usual = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
        os.makedirs(os.path.join(usual, "ray"), exist_ok=True)
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes: dict[str, Any] = {}
        self._has_gcs = True
        for _ in range(nodes):
            self.add_node()
        ray.init(address=self._cluster.address, log_to_driver=bool(os.environ.get("RAY_CLUSTER_LOG")))
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})

    def add_node(self) -> str:
        """A node more; its id."""
        node = self._cluster.add_node(num_cpus=self._cpus)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def lose_node(self, replica: int) -> str:
        """Kill the raylet above the replica's process, and with it all that runs there; the id of the node."""
        above = {parent.pid for parent in psutil.Process(replica).parents()}
        (lost,) = [node for node in self._nodes.values() if above & _processes(node)]
        self._cluster.remove_node(self._nodes.pop(lost.node_id), allow_graceful=False)
        return str(lost.node_id)

    def deploy(self, arguments: dict[str, Any], name: str, route: str) -> None:
        """Deploy an application, or another version of it. Returns when it runs."""
        serve.run(build(arguments), name=name, route_prefix=route)

    def configure(self, application: dict[str, Any]) -> None:
        """Deploy an application of a configuration file, or change it, as `serve deploy` does. Does not wait."""
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))

    def delete(self, name: str) -> None:
        """Remove an application."""
        serve.delete(name)

    def status(self) -> dict[str, Any]:
        """The status of each application, and the states of the replicas of its deployments."""
        return {
            name: {
                "status": application.status.value,
                "message": application.message,
                "replicas": {
                    deployment: {
                        str(getattr(state, "value", state)): count for state, count in found.replica_states.items()
                    }
                    for deployment, found in application.deployments.items()
                },
            }
            for name, application in serve.status().applications.items()
        }

    def kill_gcs(self) -> None:
        """Kill the head's GCS, the only place of the cluster's state unless it has another storage."""
        self._cluster.head_node.kill_gcs_server()
        self._has_gcs = False

    def start_gcs(self) -> None:
        """Start it again, at the same port."""
        self._cluster.head_node.start_gcs_server()
        self._has_gcs = True

    def close(self) -> None:
        """End everything."""
        below = psutil.Process().children(recursive=True)
        if self._has_gcs:
            serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()
        if not self._has_gcs:  # the agents of nodes would wait for it
            for process in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        self._folder.cleanup()


def _processes(node: Any) -> set[int]:
    return {found.process.pid for of_kind in node.all_processes.values() for found in of_kind}


def main() -> None:
    """Answer calls until the input ends."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Ray prints is no answer
    driver = Driver(*(int(argument) for argument in sys.argv[1:]))
    print(json.dumps({"result": None}), file=output)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"result": getattr(driver, name)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=output)
        if name == "close":
            return
    driver.close()


if __name__ == "__main__":
    main()
