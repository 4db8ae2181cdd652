from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fleet.rules import RAY_DOWN_SECONDS, RAY_UP_SECONDS
from djl_trtllm.cluster.deployment import build
from djl_trtllm.cluster.gpus import KEEPS_VISIBLE_GPUS
from djl_trtllm.cluster.ingress import BEHIND_GATEWAYS
from tests.support.models import scripted_model

ray = pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(scripted_model(tmp_path / "model"))


def options_of(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> dict[str, Any]:
    """The options of the deployment that `build` makes, and its class as `class`."""
    made: dict[str, Any] = {}

    def deployment(kind: object, **options: Any) -> Any:
        made.update(options, kind=kind)
        return SimpleNamespace(bind=lambda: made)

    monkeypatch.setattr("ray.serve.deployment", deployment)
    assert build(arguments) is made
    return dict(made)


def test_rays_own_limit_is_above_those_of_the_server(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"max_rolling_batch_size": 7, "job_queue_size": 50, "shutdown_timeout": 90}
    made = options_of(monkeypatch, {"model": model, "options": limits})
    assert made["max_ongoing_requests"] > 57
    assert made["graceful_shutdown_timeout_s"] > 90


def test_a_replica_reserves_the_gpus_of_its_ranks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def actor(**options: Any) -> dict[str, Any]:
        ranks = {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2, "backend": "pytorch"}
        return dict(options_of(monkeypatch, {"model": model, "options": ranks | options})["ray_actor_options"])

    assert actor()["num_gpus"] == 8
    assert KEEPS_VISIBLE_GPUS.keys().isdisjoint(actor()["runtime_env"]["env_vars"])
    spanning = actor(orchestrator_type="ray")
    assert spanning["num_gpus"] == 0
    assert spanning["runtime_env"]["env_vars"].items() >= KEEPS_VISIBLE_GPUS.items()


def test_arguments_reach_the_deployment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = options_of(monkeypatch, {"model": model, "name": "story", "replicas": 3, "gpus": 2, "cpus": 0.5})
    assert (made["name"], made["num_replicas"]) == ("story", 3)
    actor = made["ray_actor_options"]
    assert (actor["num_gpus"], actor["num_cpus"]) == (2, 0.5)
    assert actor["runtime_env"] == {"env_vars": {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}}


def test_autoscaling_has_bounds_and_the_concurrency_of_the_batch(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = options_of(monkeypatch, {"model": model, "autoscale": "2:5", "options": {"max_rolling_batch_size": 10}})
    scaling = made["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (2, 5)
    assert scaling.policy.policy_kwargs == {"concurrency": 7}
    assert (scaling.upscale_delay_s, scaling.downscale_delay_s) == (RAY_UP_SECONDS, RAY_DOWN_SECONDS), (
        "the simulation's"
    )
    assert "num_replicas" not in made
    assert hasattr(made["kind"], "record_autoscaling_stats")


def test_a_model_that_is_not_there_is_reported_before_anything_is_deployed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere"):
        build({"model": str(tmp_path / "nowhere")})


def deployments_of(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of all deployments that `build` makes, by their names; `bound` is what they are bound to."""
    made: dict[str, dict[str, Any]] = {}

    def deployment(kind: object, **options: Any) -> Any:
        found = made[options["name"]] = {**options, "kind": kind}
        return SimpleNamespace(bind=lambda *bound: found | {"bound": found.setdefault("bound", bound)})

    monkeypatch.setattr("ray.serve.deployment", deployment)
    assert build(arguments)["name"] == next(reversed(made))
    return made


def test_a_gateway_is_before_replicas_that_are_chosen_by_prefix(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"model": model, "routing": "prefix", "replicas": 3, "gateways": 2, "cpus": 0.5}
    made = deployments_of(monkeypatch, {**arguments, "options": {"max_rolling_batch_size": 8, "job_queue_size": 10}})
    replicas, gateway = made["djl-trtllm"], made["gateway"]
    assert replicas["num_replicas"] == 3
    router = replicas["request_router_config"]
    assert router.request_router_kwargs == {"slack": 2, "deployment": "djl-trtllm"}
    assert (
        router.get_request_router_class() is importlib.import_module("djl_trtllm.cluster.request_router").PrefixRouter
    )
    assert not hasattr(replicas["kind"], "record_autoscaling_stats")
    assert gateway["num_replicas"] == 2
    assert gateway["max_ongoing_requests"] >= 3 * replicas["max_ongoing_requests"]
    assert gateway["ray_actor_options"]["num_cpus"] == 0.5
    assert gateway["ray_actor_options"]["runtime_env"]["env_vars"].items() >= BEHIND_GATEWAYS.items()
    assert replicas["ray_actor_options"]["runtime_env"]["env_vars"] == BEHIND_GATEWAYS


def test_replicas_of_an_autoscaled_deployment_report_what_it_scales_by(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = deployments_of(monkeypatch, {"model": model, "routing": "load", "autoscale": "1:2"})
    assert "request_router_config" in made["djl-trtllm"]
    assert hasattr(made["djl-trtllm"]["kind"], "record_autoscaling_stats")


def test_several_models_are_deployments_of_their_own(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"a": {"model": model, "replicas": 2}, "b": {"model": model, "options": {"shutdown_timeout": 90}}}
    made = deployments_of(monkeypatch, {"models": models})
    assert list(made) == ["a", "b", "gateway"]
    assert [made[name]["num_replicas"] for name in made] == [2, 1, 1]
    assert [bound.options["model_name"] for name in ("a", "b") for bound in made[name]["bound"]] == ["a", "b"]
    assert made["gateway"]["graceful_shutdown_timeout_s"] > 90
