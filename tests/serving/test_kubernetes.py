"""The manifests of `serving/kubernetes` follow their schemas, and agree with the server, its options and metrics."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import ValidationError
from packaging.requirements import Requirement

from djl_trtllm.cluster.application import Autoscaling, ClusterArguments
from djl_trtllm.cluster.ray_names import DIRECT
from djl_trtllm.config import Config, Options, load
from djl_trtllm.config.options import find
from djl_trtllm.config.sources import as_arguments
from tests.support.kubernetes import FOLDER, Object, check, kustomize, needs_kubectl, one, read

ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "kubernetes.md"
METRICS = ROOT / "tests" / "server" / "metrics.txt"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's prometheus has it)")

BASES = ("server", "cpu")
"""Those that components fit."""
COMPONENTS = ("volume", "monitoring", "autoscaling", "gateway")
MANIFESTS = sorted(
    str(file.relative_to(FOLDER)) for file in FOLDER.rglob("*.yaml") if file.name != "kustomization.yaml"
)
PICKER = {
    *("trtllm_num_requests_waiting", "trtllm_num_requests_running", "trtllm_kv_cache_utilization"),
    *("trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks"),
}
"""What the endpoint picker reads of pods whose engine type is trtllm-serve."""
CLOSING_SECONDS = 20
"""The end of the engine process (5), of traces (3) and of connections (2), on a machine that is busy."""


def pod(deployment: Object | None = None) -> Object:
    """The specification of the server's pods."""
    spec: Object = (deployment or one("server/deployment.yaml", "Deployment"))["spec"]["template"]["spec"]
    return spec


def container(deployment: Object | None = None) -> Object:
    (found,) = pod(deployment)["containers"]
    return dict(found)


def environment() -> dict[str, str]:
    """The variables of the container that have a value."""
    return {each["name"]: each["value"] for each in container()["env"] if "value" in each}


def options() -> Options:
    return load(None, environment()).options


def rendered(tmp_path: Path, *parts: str) -> list[Object]:
    """The objects of a user's kustomization with this base and these components."""
    folder = tmp_path / "mine"
    folder.mkdir()
    # kustomize takes relative paths only.
    (tmp_path / "kubernetes").symlink_to(FOLDER)
    base, *components = [str(Path("../kubernetes") / part) for part in parts]
    made = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    text = yaml.safe_dump({**made, "resources": [base], "components": components})
    (folder / "kustomization.yaml").write_text(text)
    return kustomize(folder)


def triggers() -> dict[str, dict[str, str]]:
    return {
        each["name"]: each["metadata"]
        for each in one("autoscaling/scaled-object.yaml", "ScaledObject")["spec"]["triggers"]
    }


# -- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", MANIFESTS)
def test_a_manifest_follows_its_schema(file: str) -> None:
    for found in read(file):
        check(found)


@needs_kubectl
@pytest.mark.parametrize("base", BASES)
def test_a_base_with_all_components_follows_the_schemas(tmp_path: Path, base: str) -> None:
    objects = rendered(tmp_path, base, *COMPONENTS)
    for found in objects:
        check(found)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)


@needs_kubectl
def test_every_folder_is_a_kustomization_that_has_all_its_files() -> None:
    for folder in (file.parent for file in FOLDER.rglob("kustomization.yaml")):
        named = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
        there = {file.name for file in folder.iterdir()} - {"kustomization.yaml"}
        assert {name for name in named if name.endswith(".yaml")} == there


def test_a_field_that_does_not_exist_is_refused() -> None:
    deployment = one("server/deployment.yaml", "Deployment")
    container(deployment)["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(ValidationError, match="periodSecond"):
        check(deployment)
    scaled = one("autoscaling/scaled-object.yaml", "ScaledObject")
    scaled["spec"]["triggers"][0]["metadata"]["treshold"] = "1"
    with pytest.raises(jsonschema.ValidationError, match="treshold"):
        check(scaled)


# -- the server --------------------------------------------------------------------------------------------------------


def test_every_variable_is_an_option_with_an_effect() -> None:
    config = load(None, environment())
    assert (config.warnings, config.notes) == ((), ())
    for name in environment():
        if name.startswith(("OPTION_", "SERVING_")):
            assert config.is_set(name.partition("_")[2].lower()), name


def test_ports_are_the_servers() -> None:
    (port,) = container()["ports"]
    assert port == {"name": "http", "containerPort": Options().port}
    (of_service,) = one("server/service.yaml", "Service")["spec"]["ports"]
    assert (of_service["port"], of_service["targetPort"]) == (Options().port, "http")
    pool = one("gateway/inference-pool.yaml", "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": Options().port}]
    (scraped,) = one("monitoring/pod-monitor.yaml", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == ("http", "/metrics")
    probes = [container()[name]["httpGet"]["port"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["http"] * 3


def test_all_objects_select_the_pods_of_the_deployment() -> None:
    deployment = one("server/deployment.yaml", "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    assert labels >= deployment["spec"]["selector"]["matchLabels"].items()
    assert labels >= one("server/service.yaml", "Service")["spec"]["selector"].items()
    (spread,) = pod()["topologySpreadConstraints"]
    selectors = [spread["labelSelector"]] + [
        one(file, kind)["spec"]["selector"]
        for file, kind in (
            ("server/disruption-budget.yaml", "PodDisruptionBudget"),
            ("monitoring/pod-monitor.yaml", "PodMonitor"),
            ("gateway/inference-pool.yaml", "InferencePool"),
        )
    ]
    assert all(labels >= selector["matchLabels"].items() for selector in selectors)
    target = one("autoscaling/scaled-object.yaml", "ScaledObject")["spec"]["scaleTargetRef"]
    assert target == {"name": deployment["metadata"]["name"]}
    assert "replicas" not in deployment["spec"], "applying the manifests would undo what the autoscaler chose"


def test_pods_are_killed_after_the_server_has_ended_by_itself() -> None:
    command = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert command[0] == "sleep"
    needed = int(command[1]) + options().shutdown_timeout + CLOSING_SECONDS
    assert pod()["terminationGracePeriodSeconds"] >= needed
    # A pod is out of the load balancers before the server refuses requests.
    assert int(command[1]) >= container()["readinessProbe"]["periodSeconds"]


def test_the_servers_need_no_privileges() -> None:
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    user = {key: pod()["securityContext"][key] for key in ("runAsNonRoot", "runAsUser")}
    assert user == {"runAsNonRoot": True, "runAsUser": 1000}
    assert pod()["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod()["automountServiceAccountToken"] is False
    assert pod()["enableServiceLinks"] is False


@pytest.mark.parametrize("image", ["trtllm", "cpu"])
def test_the_images_caches_are_in_a_volume_that_can_be_written(image: str) -> None:
    text = (ROOT / "docker" / f"{image}.Dockerfile").read_text()
    caches = [Path(found) for found in re.findall(r"\b(?:DJL_CACHE_DIR|HF_HOME)=(\S+)", text)]
    assert len(caches) == 2
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    writable = [
        Path(mount["mountPath"])
        for mount in container()["volumeMounts"]
        if not mount.get("readOnly") and "emptyDir" in volumes[mount["name"]]
    ]
    for folder in (*caches, Path(environment()["HOME"])):
        assert any(folder.is_relative_to(path) for path in writable), folder


def test_shared_memory_is_memory_that_the_container_may_use() -> None:
    (name,) = [mount["name"] for mount in container()["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume["emptyDir"] for volume in pod()["volumes"] if volume["name"] == name]
    assert volume["medium"] == "Memory"
    size, memory = (
        int(text.removesuffix("Gi")) for text in (volume["sizeLimit"], container()["resources"]["limits"]["memory"])
    )
    assert size < memory
    assert container()["resources"]["requests"]["memory"] == container()["resources"]["limits"]["memory"]


@needs_kubectl
def test_the_cpu_image_asks_for_no_gpu(tmp_path: Path) -> None:
    (deployment,) = [found for found in rendered(tmp_path, "cpu") if found["kind"] == "Deployment"]
    assert container(deployment)["image"].startswith("djl-trtllm-cpu:")
    assert "nvidia.com/gpu" not in str(deployment)
    assert "HF_MODEL_ID" not in str(deployment)


@needs_kubectl
def test_a_model_from_a_volume_is_where_the_image_looks_for_it(tmp_path: Path) -> None:
    (deployment,) = [found for found in rendered(tmp_path, "server", "volume") if found["kind"] == "Deployment"]
    assert {"name": "model", "mountPath": "/opt/ml/model", "readOnly": True} in container(deployment)["volumeMounts"]
    assert {"tmp", "shm", "model"} == {volume["name"] for volume in pod(deployment)["volumes"]}
    assert "HF_MODEL_ID" not in str(deployment)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_of_queries_and_of_the_endpoint_picker_are_on_the_page() -> None:
    there = set(re.findall(r"^(\w+)(?:\{.*\})? ", METRICS.read_text(), re.MULTILINE))
    asked = {name for each in triggers().values() for name in re.findall(r"\bdjl_trtllm_\w+", each["query"])}
    assert len(asked) == 6
    assert asked | PICKER <= there
    labels = one("server/deployment.yaml", "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert labels["llm-d.ai/engine-type"] == "trtllm-serve"


def test_the_job_is_the_one_that_queries_alerts_and_dashboard_know() -> None:
    (scraped,) = one("monitoring/pod-monitor.yaml", "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert scraped["relabelings"] == [{"targetLabel": "job", "replacement": "djl-trtllm"}]
    jobs = {job for each in triggers().values() for job in re.findall(r'job="([^"]+)"', each["query"])}
    assert jobs == {"djl-trtllm"}
    assert 'job="djl-trtllm"' in (ROOT / "serving" / "dashboards" / "alerts.yml").read_text()


def test_a_prometheus_without_figures_takes_no_replica_away() -> None:
    # KEDA takes an empty result for 0, unless it is to be an error; after some errors comes the fallback.
    assert triggers()["load"]["ignoreNullValues"] == "false"
    fallback = one("autoscaling/scaled-object.yaml", "ScaledObject")["spec"]["fallback"]
    assert fallback["behavior"] == "currentReplicasIfHigher"
    # No full cache is no figure of the second query.
    assert "ignoreNullValues" not in triggers()["kv-cache"]


def test_a_replica_is_to_be_as_full_as_on_a_ray_cluster() -> None:
    batch = options().max_rolling_batch_size
    assert Autoscaling.parse("1:2", batch).concurrency == int(float(triggers()["load"]["threshold"]) * batch)


def _series(waiting: int, running: int, usage: float, *, pods: str = "ab", queued: int | None = None) -> dict[str, str]:
    """The metrics of pods that are all alike, at batches of 100."""
    series: dict[str, str] = {}
    for each in pods:
        series |= series_of(each, waiting, running, 100, usage, queued)
    return series


def series_of(
    pod: str, waiting: int, running: int, batch: int, usage: float, queued: int | None = None
) -> dict[str, str]:
    """The metrics of a pod, as promtool wants them."""
    values: dict[str, float] = {"ready": 1, "waiting": waiting, "running": running, "max_running": batch}
    values["kv_cache_usage_ratio"] = usage
    if queued is not None:
        values["engine_queued"] = queued
    labels = f'job="djl-trtllm",pod="{pod}",model="story"'
    return {f"djl_trtllm_{name}{{{labels}}}": f"{value}x10" for name, value in values.items()}


CASES: dict[str, tuple[dict[str, str], float | None, float | None]] = {
    # The metrics, how many batches they are, and the replicas that the second query asks for.
    "idle": (_series(0, 0, 0.0), 0.0, None),
    "half full": (_series(0, 50, 0.5), 1.0, None),
    "full": (_series(100, 100, 0.5), 4.0, None),
    "full cache": (_series(20, 30, 0.96), 1.0, 4.0),
    "full cache in TensorRT-LLM's own queue": (_series(0, 60, 0.96, queued=30), 1.2, 4.0),
    "full cache that nothing waits for": (_series(0, 60, 0.96, queued=0), 1.2, None),
    "no server": ({}, None, None),
}


@needs_promtool
@pytest.mark.parametrize("case", CASES)
def test_queries_have_the_values_that_the_rule_means(tmp_path: Path, case: str) -> None:
    series, *wanted = CASES[case]
    ask_queries(tmp_path, [(series, wanted)])


def ask_queries(folder: Path, cases: Sequence[tuple[Mapping[str, str], Sequence[float | None]]]) -> None:
    """Let promtool compare what the queries `load` and `kv-cache` have of some series with what is expected."""
    tests = []
    for series, wanted in cases:
        promql = [
            {
                "expr": triggers()[name]["query"],
                "eval_time": "5m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for name, value in zip(("load", "kv-cache"), wanted, strict=True)
        ]
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        tests.append({"interval": "1m", "input_series": inputs, "promql_expr_test": promql})
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump({"rule_files": [], "tests": tests}))
    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# -- the page ----------------------------------------------------------------------------------------------------------


@needs_kubectl
def test_the_kustomization_of_the_page_does_what_it_says(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "kustomization.yaml").write_text(text)
    (tmp_path / "djl-trtllm" / "serving").mkdir(parents=True)
    (tmp_path / "djl-trtllm" / "serving" / "kubernetes").symlink_to(FOLDER)
    objects = kustomize(tmp_path)
    for found in objects:
        check(found)
    assert {found["metadata"]["namespace"] for found in objects} == {"llm"}
    (deployment,) = [found for found in objects if found["kind"] == "Deployment"]
    changed = container(deployment)
    assert changed["image"] == "registry.example.com/djl-trtllm:0.1"
    variables = {each["name"]: each["value"] for each in changed["env"] if "value" in each}
    config = load(None, variables)
    assert (config.warnings, config.notes) == ((), ())
    assert changed["resources"]["limits"]["nvidia.com/gpu"] == str(config.options.tensor_parallel_degree)
    assert variables["HF_MODEL_ID"].startswith("s3://")


def test_the_page_has_the_times_and_options_of_the_manifests() -> None:
    page = PAGE.read_text()
    pause, grace = container()["lifecycle"]["preStop"]["exec"]["command"][1], pod()["terminationGracePeriodSeconds"]
    assert f"`preStop`, {pause} seconds" in page
    assert f"`SERVING_SHUTDOWN_TIMEOUT`, {options().shutdown_timeout:.0f} seconds" in page
    assert f"`terminationGracePeriodSeconds`, {grace} seconds" in page
    for name in set(re.findall(r"`(?:OPTION|SERVING)_([A-Z_]+[A-Z])\b", page)):
        assert find(f"option.{name.lower()}") or find(name.lower()), name


# -- the RayService agrees with `djl_trtllm.cluster:build`, its options and the nodes that it needs --------------------

DRAIN_OF_RAY = 40
"""See `cluster.application`: what a replica gets beside its shutdown_timeout."""


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


def test_the_application_is_there_and_its_options_are_options() -> None:
    module, _, name = application()["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
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


def test_clients_reach_replicas_directly_on_every_node_and_none_has_privileges() -> None:
    assert len(containers()) == 2
    for container in containers():
        assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        variables = {each["name"]: each["value"] for each in container["env"]}
        assert variables.items() >= DIRECT.items()
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["serve"] == 8000


def test_streams_end_before_their_pods_and_clusters() -> None:
    longest = config().options.shutdown_timeout + DRAIN_OF_RAY
    assert service()["rayClusterDeletionDelaySeconds"] > longest
    assert workers()["template"]["spec"]["terminationGracePeriodSeconds"] > longest


def test_the_nodes_run_a_version_of_ray_that_the_package_supports() -> None:
    (supported,) = re.findall(r'^ray = \["([^"]+)"\]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    version = service()["rayClusterConfig"]["rayVersion"]
    assert version in Requirement(supported).specifier
    assert re.findall(r'"ray\[serve\]==([\d.]+)"', (ROOT / "docs" / "kubernetes.md").read_text()) == [version]
