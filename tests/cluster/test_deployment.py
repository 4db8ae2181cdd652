from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.cluster.deployment import build
from djl_trtllm.errors import ConfigError
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
    def gpus(**options: Any) -> float:
        return float(options_of(monkeypatch, {"model": model, "options": options})["ray_actor_options"]["num_gpus"])

    ranks = {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2}
    assert gpus(backend="scripted", **ranks) == 0
    assert gpus(backend="pytorch", **ranks) == 8
    assert gpus(backend="pytorch", orchestrator_type="ray", **ranks) == 0, "TensorRT-LLM reserves them itself"
    assert gpus(backend="auto") == 0, "this cluster has none"
    with pytest.raises(ConfigError, match=r"tensor_parallel_degree=max .* give a number, or the argument gpus"):
        gpus(backend="pytorch", tensor_parallel_degree="max")


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
    assert "num_replicas" not in made
    assert hasattr(made["kind"], "record_autoscaling_stats")


def test_a_model_that_is_not_there_is_reported_before_anything_is_deployed(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere"):
        build({"model": str(tmp_path / "nowhere")})
