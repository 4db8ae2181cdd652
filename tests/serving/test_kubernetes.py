"""The chart of `serving/kubernetes` follows its schemas, and agrees with the server, its options and metrics."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import ValidationError
from packaging.requirements import Requirement

from djl_trtllm.cluster.application import ClusterArguments
from djl_trtllm.cluster.ray_names import DIRECT
from djl_trtllm.config import Config, Options, load
from djl_trtllm.config.options import find
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.routing.scaling import Autoscaling, target_concurrency
from tests.support.kubernetes import CHART, FOLDER, NAMESPACE, Object, check, helm, one, rendered
from tests.support.tables import by_rows

ROOT = FOLDER.parents[1]
PAGE = ROOT / "docs" / "kubernetes.md"
METRICS = ROOT / "tests" / "server" / "metrics.txt"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's prometheus has it)")

EVERYTHING: Object = {
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
    "gateway": {"enabled": True, "namespace": "edge", "hostnames": ["story.example.com"]},
    "networkPolicy": {"enabled": True, "namespaces": ["edge", "monitoring"]},
}
TWO_NODES: Object = {**EVERYTHING, "nodes": 2, "gpus": 8, "sshSecret": "ranks"}
VALUES: dict[str, Object] = {
    "defaults": {},
    "everything": EVERYTHING,
    "cpu": yaml.safe_load((FOLDER / "cpu.yaml").read_text()),
    "two nodes": TWO_NODES,
    "a claim": {"model": {"volume": {"claim": "weights"}}, "engineCache": {"claim": "engines"}},
    "an image": {"model": {"volume": {"image": "registry.example.com/weights:1"}}, "replicas": 0},
    "details": {
        "image": {"pullSecrets": ["registry"]},
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::123456789012:role/models"}},
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "env": [{"name": "SERVING_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "first"}}}],
    },
}
PICKER = {
    *("trtllm_num_requests_waiting", "trtllm_num_requests_running", "trtllm_kv_cache_utilization"),
    *("trtllm_kv_cache_tokens_per_block", "trtllm_kv_cache_max_blocks"),
}
"""What the endpoint picker reads of pods whose engine type is trtllm-serve."""
CLOSING_SECONDS = 20
"""The end of the engine process (5), of traces (3) and of connections (2), on a machine that is busy."""


def pod(values: Object | None = None) -> Object:
    """The specification of the server's pods."""
    spec: Object = one("Deployment", values)["spec"]["template"]["spec"]
    return spec


def container(values: Object | None = None) -> Object:
    (found,) = pod(values)["containers"]
    return dict(found)


def environment(values: Object | None = None) -> dict[str, str]:
    """The variables of the container that have a value."""
    return {each["name"]: each["value"] for each in container(values)["env"] if "value" in each}


def options() -> Options:
    return load(None, environment()).options


def triggers() -> dict[str, dict[str, str]]:
    return {each["name"]: each["metadata"] for each in one("ScaledObject", EVERYTHING)["spec"]["triggers"]}


def group(role: str) -> Object:
    """The template of the leader's or the workers' pods, with two nodes."""
    found: Object = one("LeaderWorkerSet", TWO_NODES)["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    return found


# -- schemas -----------------------------------------------------------------------------------------------------------


@by_rows("case", VALUES)
def test_the_objects_of_a_release_follow_their_schemas(case: str) -> None:
    objects = rendered(VALUES[case])
    for found in objects:
        check(found)
    names = [(found["kind"], found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)


def test_the_rayservice_follows_its_schema() -> None:
    check(yaml.safe_load((FOLDER / "ray" / "ray-service.yaml").read_text()))


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    found = helm().lint(str(CHART))
    assert found["errors"] == []
    assert [each["error"] for each in found["messages"]] == ["icon is recommended"]


def test_a_field_that_does_not_exist_is_refused() -> None:
    deployment = one("Deployment")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(ValidationError, match="periodSecond"):
        check(deployment)
    scaled = one("ScaledObject", EVERYTHING)
    scaled["spec"]["triggers"][0]["metadata"]["treshold"] = "1"
    with pytest.raises(jsonschema.ValidationError, match="treshold"):
        check(scaled)


# -- values ------------------------------------------------------------------------------------------------------------


def _schemas(schema: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}.{name}".lstrip("."), inner
        yield from _schemas(inner, f"{path}.{name}")


def test_every_value_has_a_description_and_every_default_is_declared() -> None:
    declared = dict(_schemas(json.loads((CHART / "values.schema.json").read_text())))
    assert [name for name, schema in declared.items() if not schema.get("description")] == []
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in declared:
        if name == "global" or name.startswith(("model.volume.", "engineCache.")):
            continue
        found = defaults
        for part in name.split("."):
            assert part in found, name
            found = found[part]


@by_rows(
    ("values", "key"),
    [
        ({"modle": {"id": "x"}}, "modle"),
        ({"gpus": "2"}, "/gpus"),
        ({"nodes": 2}, "/sshSecret"),
        ({"resources": {"memory": "48GB"}}, "/resources/memory"),
        ({"options": {"option.dtype": "fp16"}}, "option.dtype"),
        ({"autoscaling": {"enabled": True}}, "/monitoring/enabled"),
        ({**EVERYTHING, "replicas": 2}, "/replicas"),
        ({"model": {"volume": {"claim": "a", "image": "b"}}}, "/model/volume"),
        ({"serving": {"shutdown_timeout": "2m"}}, "/serving/shutdown_timeout"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(values: Object, key: str) -> None:
    with pytest.raises(helm().HelmError, match=re.escape(key)):
        rendered(values)


def test_values_of_options_arrive_as_they_are_written() -> None:
    values = {
        "options": {"max_num_tokens": 2_000_000, "dtype": "fp16", "enable_chunked_context": True, "temperature": 0.5}
    }
    found = environment(values)
    assert [found[f"OPTION_{name.upper()}"] for name in values["options"]] == ["2000000", "fp16", "true", "0.5"]


# -- two releases in a namespace ---------------------------------------------------------------------------------------


def _selectors(value: Any, inside: str = "") -> Iterator[Mapping[str, str]]:
    """All labels by which an object selects pods."""
    if isinstance(value, dict):
        if inside in ("selector", "podSelector", "labelSelector") and value:
            yield value.get("matchLabels", value)
        for key, inner in value.items():
            if not (inside in ("selector", "podSelector", "labelSelector") and key == "matchLabels"):
                yield from _selectors(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _selectors(inner, inside)


def _pod_labels(objects: Sequence[Object]) -> list[Mapping[str, str]]:
    found = []
    for each in objects:
        spec = each.get("spec", {})
        templates = [spec.get("template"), *spec.get("leaderWorkerTemplate", {}).values()]
        found += [template["metadata"]["labels"] for template in templates if isinstance(template, dict)]
    return found


@pytest.mark.parametrize("values", [EVERYTHING, TWO_NODES], ids=["one node", "two nodes"])
def test_two_releases_in_a_namespace_share_no_name_and_no_selector(values: Object) -> None:
    releases = {name: rendered(values, name) for name in ("story", "story-large")}
    names = [{(each["kind"], each["metadata"]["name"]) for each in objects} for objects in releases.values()]
    assert not names[0] & names[1]
    for name, objects in releases.items():
        selectors = [selector for each in objects for selector in _selectors(each.get("spec", {}))]
        assert len(selectors) >= 7
        (other,) = [labels for each, labels in releases.items() if each != name]
        for selector in selectors:
            assert any(labels.items() >= selector.items() for labels in _pod_labels(objects)), selector
            assert not any(labels.items() >= selector.items() for labels in _pod_labels(other)), selector


def test_references_between_objects_name_the_release() -> None:
    for values, workload in ((EVERYTHING, "Deployment"), (TWO_NODES, "LeaderWorkerSet")):
        objects = {each["kind"]: each for each in rendered(values, "fable")}
        assert {each["metadata"]["name"] for each in objects.values()} == {"fable"}
        assert {each["metadata"]["namespace"] for each in objects.values()} == {NAMESPACE}
        target = objects["ScaledObject"]["spec"]["scaleTargetRef"]
        assert (target.get("kind", "Deployment"), target["name"]) == (workload, "fable")
        (rule,) = objects["HTTPRoute"]["spec"]["rules"]
        assert rule["backendRefs"] == [
            {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "fable"}
        ]
        assert objects["InferencePool"]["spec"]["endpointPickerRef"]["name"] == "fable-picker-epp"
        for trigger in objects["ScaledObject"]["spec"]["triggers"]:
            selectors = re.findall(r"\{(.*?)\}", trigger["metadata"]["query"])
            assert set(selectors) == {f'job="djl-trtllm",namespace="{NAMESPACE}",release="fable"'}
        (scraped,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
        assert {"targetLabel": "release", "replacement": "fable"} in scraped["relabelings"]


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
    (of_service,) = one("Service")["spec"]["ports"]
    assert (of_service["port"], of_service["targetPort"]) == (Options().port, "http")
    pool = one("InferencePool", EVERYTHING)["spec"]
    assert pool["targetPorts"] == [{"number": Options().port}]
    (scraped,) = one("PodMonitor", EVERYTHING)["spec"]["podMetricsEndpoints"]
    assert (scraped["port"], scraped["path"]) == ("http", "/metrics")
    probes = [container()[name]["httpGet"]["port"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert probes == ["http"] * 3


def test_applying_a_release_again_keeps_the_replicas_that_an_autoscaler_chose() -> None:
    assert "replicas" not in one("Deployment", EVERYTHING)["spec"]
    assert "replicas" not in one("LeaderWorkerSet", TWO_NODES)["spec"]
    assert [one("Deployment", {"replicas": count})["spec"]["replicas"] for count in (0, 3)] == [0, 3]


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


def test_a_pod_asks_for_the_ephemeral_storage_that_it_may_use() -> None:
    resources = container({"resources": {"storage": "300Gi"}})["resources"]
    assert [resources[kind]["ephemeral-storage"] for kind in ("requests", "limits")] == ["300Gi"] * 2
    (size,) = [each["emptyDir"]["sizeLimit"] for each in pod({"resources": {"storage": "300Gi"}})["volumes"][:1]]
    assert size == "300Gi"


def test_the_cpu_image_asks_for_no_gpu() -> None:
    deployment = one("Deployment", VALUES["cpu"])
    (served,) = deployment["spec"]["template"]["spec"]["containers"]
    assert served["image"].startswith("djl-trtllm-cpu:")
    for absent in ("nvidia.com/gpu", "HF_MODEL_ID", "TENSOR_PARALLEL"):
        assert absent not in str(deployment)


@pytest.mark.parametrize(
    ("volume", "source"),
    [
        ({"claim": "weights"}, {"persistentVolumeClaim": {"claimName": "weights", "readOnly": True}}),
        ({"image": "r/weights:1"}, {"image": {"reference": "r/weights:1", "pullPolicy": "IfNotPresent"}}),
    ],
)
def test_a_model_from_a_volume_is_where_the_image_looks_for_it(volume: Object, source: Object) -> None:
    values = {"model": {"volume": volume}}
    assert {"name": "model", "mountPath": "/opt/ml/model", "readOnly": True} in container(values)["volumeMounts"]
    assert {"name": "model", **source} in pod(values)["volumes"]
    assert "HF_MODEL_ID" not in environment(values)


def test_a_volume_of_engines_is_the_cache_and_can_be_written() -> None:
    values = {"engineCache": {"claim": "engines"}}
    (mount,) = [each for each in container(values)["volumeMounts"] if each["name"] == "engines"]
    assert load(None, environment(values)).options.engine_cache_dir == Path(mount["mountPath"])
    assert not mount.get("readOnly")


def test_only_the_namespace_and_those_named_reach_the_port() -> None:
    (rule,) = one("NetworkPolicy", EVERYTHING)["spec"]["ingress"]
    assert rule["ports"] == [{"port": "http"}]
    own, others = rule["from"]
    assert own == {"podSelector": {}}
    (expression,) = others["namespaceSelector"]["matchExpressions"]
    assert (expression["key"], expression["values"]) == ("kubernetes.io/metadata.name", ["edge", "monitoring"])
    (alone,) = one("NetworkPolicy", {"networkPolicy": {"enabled": True}})["spec"]["ingress"]
    assert alone["from"] == [{"podSelector": {}}]


# -- two nodes ---------------------------------------------------------------------------------------------------------


def test_a_group_of_nodes_has_its_gpus_as_ranks() -> None:
    (leader,) = group("leader")["spec"]["containers"]
    found = {each["name"]: each["value"] for each in leader["env"] if "value" in each}
    config = load(None, {**found, "TLLM_SPAWN_PROXY_PROCESS": "1"})
    assert (config.warnings, config.notes) == ((), ())
    given = config.options
    assert (given.num_nodes, given.gpus_per_node, given.tensor_parallel_degree) == (2, 8, 16)
    assert one("LeaderWorkerSet", TWO_NODES)["spec"]["leaderWorkerTemplate"]["size"] == 2
    (worker,) = group("worker")["spec"]["containers"]
    assert worker["env"] == leader["env"]
    assert {each["resources"]["limits"]["nvidia.com/gpu"] for each in (leader, worker)} == {"8"}


@pytest.mark.parametrize(
    ("options", "degree"),
    [
        ({}, 16),
        ({"pipeline_parallel_degree": 2}, 8),
        ({"pipeline_parallel_degree": 2, "context_parallel_size": 4}, 2),
        ({"pipeline_parallel_degree": 3, "tensor_parallel_degree": 5}, 5),
    ],
)
def test_ranks_are_no_more_than_the_gpus_of_a_group(options: Object, degree: int) -> None:
    found = one("LeaderWorkerSet", {**TWO_NODES, "options": options})["spec"]["leaderWorkerTemplate"]
    (leader,) = found["leaderTemplate"]["spec"]["containers"]
    assert {"name": "OPTION_TENSOR_PARALLEL_DEGREE", "value": str(degree)} in leader["env"]


def test_gpus_that_cannot_be_divided_among_ranks_are_refused_with_the_names_of_the_options() -> None:
    with pytest.raises(helm().HelmError, match=r"options\.pipeline_parallel_degree"):
        rendered({"gpus": 8, "options": {"pipeline_parallel_degree": 3}})


def test_every_option_that_follows_from_other_values_is_in_their_description() -> None:
    given = yaml.safe_load((CHART / "values.yaml").read_text())["options"]
    values = {**TWO_NODES, "engineCache": {"claim": "engines"}}
    found = one("LeaderWorkerSet", values)["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"][0]
    derived = {each["name"] for each in found["env"] if each["name"].startswith("OPTION_")}
    derived = {name.removeprefix("OPTION_").lower() for name in derived} - set(given)
    assert len(derived) == 5
    described = json.loads((CHART / "values.schema.json").read_text())["properties"]["options"]["description"]
    assert derived <= set(re.findall(r"\w+", described))


def test_only_the_leader_gets_requests_and_scrapes() -> None:
    labels = {role: group(role)["metadata"]["labels"].items() for role in ("leader", "worker")}
    for kind in ("Service", "PodMonitor", "InferencePool"):
        selector = one(kind, TWO_NODES)["spec"]["selector"]
        wanted = selector.get("matchLabels", selector).items()
        assert labels["leader"] >= wanted
        assert not labels["worker"] >= wanted


def test_the_policy_and_the_budget_are_for_all_pods_of_a_group() -> None:
    selectors = [
        one("NetworkPolicy", TWO_NODES)["spec"]["podSelector"],
        one("PodDisruptionBudget", TWO_NODES)["spec"]["selector"],
    ]
    for role in ("leader", "worker"):
        labels = group(role)["metadata"]["labels"].items()
        assert all(labels >= selector["matchLabels"].items() for selector in selectors), role


def test_shellcheck_finds_nothing_in_the_scripts_of_a_group() -> None:
    (leader,), (worker,) = (group(role)["spec"]["containers"] for role in ("leader", "worker"))
    for command in (leader["command"], worker["command"], leader["lifecycle"]["preStop"]["exec"]["command"]):
        assert command[:2] == ["bash", "-c"]
        # $variables is to be split into words.
        checker = [str(Path(sys.executable).with_name("shellcheck")), "--shell=bash", "--exclude=SC2086", "-"]
        checked = subprocess.run(checker, input=command[2], capture_output=True, text=True, check=False)
        assert checked.stdout == ""


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_of_queries_and_of_the_endpoint_picker_are_on_the_page() -> None:
    there = set(re.findall(r"^(\w+)(?:\{.*\})? ", METRICS.read_text(), re.MULTILINE))
    asked = {name for each in triggers().values() for name in re.findall(r"\bdjl_trtllm_\w+", each["query"])}
    assert len(asked) == 6
    assert asked | PICKER <= there
    for labels in (one("Deployment")["spec"]["template"]["metadata"]["labels"], group("leader")["metadata"]["labels"]):
        assert labels["llm-d.ai/engine-type"] == "trtllm-serve"


def test_the_job_is_the_one_that_queries_alerts_and_dashboard_know() -> None:
    (scraped,) = one("PodMonitor", EVERYTHING)["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "djl-trtllm"} in scraped["relabelings"]
    jobs = {job for each in triggers().values() for job in re.findall(r'job="([^"]+)"', each["query"])}
    assert jobs == {"djl-trtllm"}
    assert 'job="djl-trtllm"' in (ROOT / "serving" / "dashboards" / "alerts.yml").read_text()


def test_a_prometheus_without_figures_takes_no_replica_away() -> None:
    # KEDA takes an empty result for 0, unless it is to be an error; after some errors comes the fallback.
    assert triggers()["load"]["ignoreNullValues"] == "false"
    fallback = one("ScaledObject", EVERYTHING)["spec"]["fallback"]
    assert fallback["behavior"] == "currentReplicasIfHigher"
    # No full cache is no figure of the second query.
    assert "ignoreNullValues" not in triggers()["kv-cache"]


def test_a_replica_is_to_be_as_full_as_on_a_ray_cluster() -> None:
    batch = options().max_rolling_batch_size
    assert target_concurrency(batch) == int(float(triggers()["load"]["threshold"]) * batch)


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
    labels = f'job="djl-trtllm",namespace="{NAMESPACE}",release="story",pod="{pod}",model="story"'
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
@by_rows("case", CASES)
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


def test_the_values_of_the_page_do_what_it_says() -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    values = yaml.safe_load(text)
    for found in rendered(values):
        check(found)
    changed = container(values)
    assert changed["image"] == "registry.example.com/djl-trtllm:0.1"
    variables = environment(values)
    config = load(None, variables)
    assert (config.warnings, config.notes) == ((), ())
    assert changed["resources"]["limits"]["nvidia.com/gpu"] == str(config.options.tensor_parallel_degree)
    assert variables["HF_MODEL_ID"].startswith("s3://")


def test_the_page_has_the_times_and_options_of_the_chart() -> None:
    page = PAGE.read_text()
    pause, grace = container()["lifecycle"]["preStop"]["exec"]["command"][1], pod()["terminationGracePeriodSeconds"]
    assert f"`preStop`, {pause} seconds" in page
    assert f"`serving.shutdown_timeout`, {options().shutdown_timeout:.0f} seconds" in page
    assert f"`terminationGracePeriodSeconds`, {grace} seconds" in page
    for name in set(re.findall(r"`(?:OPTION|SERVING)_([A-Z_]+[A-Z])\b", page)):
        assert find(f"option.{name.lower()}") or find(name.lower()), name


def test_every_value_that_the_pages_name_is_a_value() -> None:
    declared = dict(_schemas(json.loads((CHART / "values.schema.json").read_text())))
    for file in (PAGE, FOLDER / "README.md"):
        groups = "|".join(name for name, schema in declared.items() if "properties" in schema and "." not in name)
        named = re.findall(rf"`((?:{groups})\.[A-Za-z.]+)`", file.read_text())
        assert named
        assert {name for name in named if not name.startswith(("options.", "serving."))} <= declared.keys()


# -- the RayService agrees with `djl_trtllm.cluster:build`, its options and the nodes that it needs --------------------

DRAIN_OF_RAY = 40
"""See `cluster.application`: what a replica gets beside its shutdown_timeout."""


def service() -> Object:
    found: Object = yaml.safe_load((FOLDER / "ray" / "ray-service.yaml").read_text())["spec"]
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
    scaling = Autoscaling.parse(asked)
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
