from __future__ import annotations

import re
from pathlib import Path

import yaml

from djl_trtllm.cluster.ingress import DIRECT, NODES, problem_of_ingress

ROOT = Path(__file__).parents[2]


def test_nothing_is_lost_where_clients_reach_the_replica_directly() -> None:
    assert problem_of_ingress(DIRECT) is None


def test_what_is_missing_is_named() -> None:
    for name, value in DIRECT.items():
        problem = problem_of_ingress({other: DIRECT[other] for other in DIRECT if other != name})
        assert problem is not None and problem.endswith(f"Set {name}={value} on all nodes")


def test_the_document_has_the_environment_of_the_nodes() -> None:
    exports = re.findall(r'^export (\w+)="?(.*?)"? *(?:#.*)?$', (ROOT / "docs" / "ray.md").read_text(), re.MULTILINE)
    assert dict(exports) == NODES


def test_the_rayservice_has_the_environment_of_the_nodes() -> None:
    cluster = yaml.safe_load((ROOT / "serving/kubernetes/ray/ray-service.yaml").read_text())["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        given = {variable["name"]: variable["value"] for variable in container["env"]}
        assert given.items() >= NODES.items()
