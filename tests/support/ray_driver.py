"""The driver of a Ray cluster on this machine, as a program: `python -m tests.support.ray_driver PORT CPUS NODES`.

A line of its input is a call, `[name, arguments]` in JSON; a line of its output is what the call returned, or its
error. It ends, with the cluster, when its input does. `tests.support.ray_cluster` is its client.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from djl_trtllm.cluster import build
from djl_trtllm.cluster.control import current_cluster


class Driver:
    """The cluster: a head without CPUs, which has the proxy, and nodes for the replicas. Public methods are calls."""

    def __init__(self, port: int, cpus: int, nodes: int) -> None:
        self._cpus = cpus
        self._folder = tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True)
        # Ray notes the cluster there, and makes the folder only for clusters that have their files in it.
        current_cluster().parent.mkdir(parents=True, exist_ok=True)
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": self._folder.name}
        # Ray notes the address of the newest cluster in its usual folder, and does not make it.
        os.makedirs(os.path.join(os.environ.get("RAY_TMPDIR", "/tmp"), "ray"), exist_ok=True)
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
        """Of the applications: status, and the states of the replicas of each deployment."""
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
