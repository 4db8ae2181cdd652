"""The RayService agrees with `djl_trtllm.cluster:build`, its options and the nodes that it needs."""

from __future__ import annotations

import importlib
import re
from typing import Any

import yaml
from packaging.requirements import Requirement

from djl_trtllm.cluster.arguments import ClusterArguments
from djl_trtllm.cluster.ingress import DIRECT
from djl_trtllm.cluster.replica_metrics import joined
from djl_trtllm.config import Config, load
from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.model.remote.aws_scaling import Autoscaling
from tests.support.kubernetes import FOLDER, Object, one

ROOT = FOLDER.parents[1]
DRAIN_OF_RAY = 40
"""See `cluster.deployment`: what a replica gets beside its shutdown_timeout."""


def service() -> Object:
    found: Object = one("ray/ray-service.yaml", "RayService")["spec"]
    return found


def application() -> dict[str, Any]:
    (found,) = yaml.safe_load(service()["serveConfigV2"])["applications"]
    return dict(found)


def arguments() -> ClusterArguments:
    return ClusterArguments.parse(application()["args"])


def config() -> Config:
    return load(None, {}, arguments=as_arguments(arguments().options))


def workers() -> Object:
    (group,) = service()["rayClusterConfig"]["workerGroupSpecs"]
    return dict(group)


def containers() -> list[Object]:
    """Of the head's pods and of the workers'."""
    groups = (service()["rayClusterConfig"]["headGroupSpec"], workers())
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


def test_what_it_imports_is_there() -> None:
    module, _, name = application()["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_its_options_are_options() -> None:
    assert (config().warnings, config().notes) == ((), ())
    assert arguments().direct


def test_a_replica_has_the_gpus_that_its_options_need_and_a_node_has_as_many() -> None:
    assert arguments().gpus == config().options.tensor_parallel_degree
    (worker,) = workers()["template"]["spec"]["containers"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == str(arguments().gpus)


def test_there_may_be_as_many_nodes_as_replicas() -> None:
    asked = arguments().autoscale
    assert asked is not None
    scaling = Autoscaling.parse(asked, config().options.max_rolling_batch_size)
    assert (workers()["minReplicas"], workers()["maxReplicas"]) == (scaling.least, scaling.most)
    assert service()["rayClusterConfig"]["enableInTreeAutoscaling"]


def test_clients_reach_replicas_directly_on_every_node() -> None:
    assert len(containers()) == 2
    for container in containers():
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables.items() >= DIRECT.items()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == 8000


def test_the_figures_of_all_replicas_are_asked_for_at_the_head_and_each_is_an_instance() -> None:
    monitor = one("ray-monitoring/pod-monitor.yaml", "PodMonitor")["spec"]
    head = service()["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"]["labels"]
    assert head == monitor["selector"]["matchLabels"]
    assert workers()["template"].get("metadata", {}).get("labels", {}).items().isdisjoint(head.items())
    (scraped,) = monitor["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == ("serve", "/metrics")
    (of_server,) = one("monitoring/pod-monitor.yaml", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["relabelings"] == of_server["relabelings"]
    page = joined({("model", "r1"): b"# HELP up Is up.\n# TYPE up gauge\nup 1.0\n"}).decode()
    (label,) = scraped["metricRelabelings"][0]["sourceLabels"]
    assert f'{label}="r1"' in page
    assert [each["targetLabel"] for each in scraped["metricRelabelings"]] == ["instance"]


def test_streams_end_before_their_pods_and_clusters() -> None:
    longest = config().options.shutdown_timeout + DRAIN_OF_RAY
    assert service()["rayClusterDeletionDelaySeconds"] > longest
    assert workers()["template"]["spec"]["terminationGracePeriodSeconds"] > longest


def test_the_nodes_run_a_version_of_ray_that_the_package_supports() -> None:
    (supported,) = re.findall(r'^ray = \["(.+)"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    version = service()["rayClusterConfig"]["rayVersion"]
    assert version in Requirement(supported).specifier
    assert re.findall(r'"ray\[serve\]==([\d.]+)"', (ROOT / "docs" / "kubernetes.md").read_text()) == [version]


def test_no_node_has_privileges() -> None:
    for container in containers():
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
