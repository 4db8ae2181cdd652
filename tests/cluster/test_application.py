"""`build`: the arguments, the deployment that Ray Serve gets, its GPUs and its autoscaling."""

from __future__ import annotations

import importlib.metadata
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.version import Version

from benchmarks.fleet.rules import RAY_DOWN_SECONDS, RAY_UP_SECONDS
from djl_trtllm.cluster import ray_names
from djl_trtllm.cluster.application import (
    KEEPS_VISIBLE_GPUS,
    ClusterArguments,
    build,
    reserved_gpus,
)
from djl_trtllm.config import load
from djl_trtllm.errors import ConfigError
from djl_trtllm.routing.scaling import QueueAndCachePolicy
from tests.support.models import scripted_model
from tests.support.tables import by_rows, by_table

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)

from ray.serve.exceptions import RayServeException

from djl_trtllm.cluster.router import PrefixRouter, Router


def test_a_configuration_file_gives_values_and_serve_run_gives_texts() -> None:
    expected = ClusterArguments(model="/m", options={"option.dtype": "fp16"}, replicas=3, gpus=2, cpus=0.5, direct=True)
    options = {"option.dtype": "fp16"}
    file = {"model": "/m", "options": options, "replicas": 3, "gpus": 2, "cpus": 0.5, "direct": True}
    texts = {"model": "/m", "option.dtype": "fp16", "replicas": "3", "gpus": "2", "cpus": "0.5", "direct": "true"}
    assert ClusterArguments.parse(file) == ClusterArguments.parse(texts) == expected
    both = {"options": {"a": 1, "option.b": 2}, "option.b": 3}
    assert ClusterArguments.parse(both).options == {"a": 1, "option.b": 3}


@by_table("given", "problem")
def test_what_is_wrong_with_an_argument_is_an_error_that_names_it(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        ClusterArguments.parse(given)
    assert problem in str(error.value)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(scripted_model(tmp_path / "model"))


class Deployments(dict[str, dict[str, Any]]):
    """What `build` makes, by name: the options of each deployment, its class as `kind`, and what it is `bound` to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        monkeypatch.setattr("ray.serve.deployment", self._deployment)

    def _deployment(self, kind: object, **options: Any) -> Any:
        made = self[options["name"]] = {**options, "kind": kind}

        def bind(*bound: object) -> dict[str, Any]:
            made["bound"] = bound
            return made

        def with_options(**more: Any) -> Any:
            made.update(more)
            return SimpleNamespace(bind=bind)

        return SimpleNamespace(bind=bind, options=with_options)


def deployment_of(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> dict[str, Any]:
    """The only deployment that `build` makes."""
    deployments = Deployments(monkeypatch)
    built: object = build(arguments)
    (made,) = deployments.values()
    assert built == made
    return made


def test_arguments_and_limits_reach_the_deployment(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"max_rolling_batch_size": 7, "job_queue_size": 50, "shutdown_timeout": 90}
    given = {"name": "story", "replicas": 3, "gpus": 2, "cpus": 0.5, "options": limits}
    made = deployment_of(monkeypatch, {"model": model, **given})
    assert (made["name"], made["num_replicas"]) == ("story", 3)
    # Ray's own limits are above those of the server.
    assert (made["max_ongoing_requests"], made["graceful_shutdown_timeout_s"]) == (100_000, 130)
    assert (made["health_check_period_s"], made["health_check_timeout_s"]) == (5, 10)
    assert made["max_constructor_retry_count"] == 3
    actor = made["ray_actor_options"]
    assert (actor["num_gpus"], actor["num_cpus"]) == (2, 0.5)
    environ = actor["runtime_env"]["env_vars"]
    assert environ == {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "FORWARDED_ALLOW_IPS": ""}
    assert ClusterArguments(replicas=3).most_replicas == 3
    assert ClusterArguments(autoscale="1:4").most_replicas == 4


def test_only_proxies_that_are_named_say_who_a_client_is(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forwarded_allow_ips(**options: Any) -> str:
        actor = deployment_of(monkeypatch, {"model": model, "options": options})["ray_actor_options"]
        return str(actor["runtime_env"]["env_vars"]["FORWARDED_ALLOW_IPS"])

    assert forwarded_allow_ips() == "", "HAProxy is on this machine, and passes on what clients write"
    named = {"forwarded_allow_ips": "10.0.0.0/8,127.0.0.1"}
    assert forwarded_allow_ips(**named) == "10.0.0.0/8,127.0.0.1"
    with pytest.raises(ConfigError, match="max_requests_per_client"):
        forwarded_allow_ips(max_requests_per_client=5)
    for known in (named, {"client_header": "x-user-id"}):
        forwarded_allow_ips(max_requests_per_client=5, **known)


def test_several_replicas_have_a_router_where_haproxy_can_ask_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_router(**arguments: Any) -> bool:
        deployments = Deployments(monkeypatch)
        build({"model": model, **arguments})
        return len(deployments) > 1

    monkeypatch.setattr(ray_names, "with_router", lambda application, router: application)
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    assert not has_router(replicas=2)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert not has_router(), "there is nothing to choose"
    if not ray_names.has_routers():
        pytest.skip("this Ray asks no router of ours")
    assert has_router(replicas=2) and has_router(autoscale="1:2")


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_and_their_router_know_each_other(model: str, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    if not ray_names.has_routers():
        pytest.skip("this Ray asks no router of ours")
    context = SimpleNamespace(replica_id=SimpleNamespace(to_full_id_str=lambda: "story#1"), app_name="default")
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    monkeypatch.setattr("ray.serve.get_deployment_handle", lambda *names: names)
    monkeypatch.setattr("ray.serve.ingress", lambda *made: lambda kind: (kind, *made))
    monkeypatch.setattr(ray_names, "with_router", lambda application, router: (application, router))
    made, several = Deployments(monkeypatch), replicas > 1
    built: Any = build({"model": model, "name": "story", "replicas": replicas})
    _, application = made["story"]["kind"]
    app = application()
    assert (app.name, app.router) == ("story#1", ("story-router", "default") if several else None)
    assert ("user_config" in app.context.unchangeable) == several
    if not several:
        assert (built, list(made)) == (made["story"], ["story"])
        return
    router = made["story-router"]
    assert built == (made["story"], router)
    assert (router["kind"], router["bound"]) == ((Router,), (made["story"],))
    assert router["ray_actor_options"] == {"num_cpus": 0, "runtime_env": {"env_vars": ray_names.OF_ROUTERS}}
    assert router["max_ongoing_requests"] == 100_000
    assert router["logging_config"]["enable_access_log"] is False
    config = made["story"]["request_router_config"]
    assert config.get_request_router_class() is PrefixRouter
    assert config.request_routing_stats_period_s == 1


def test_a_replica_that_has_to_be_reached_directly_does_not_start_behind_a_proxy(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_SERVE_ENABLE_HA_PROXY", raising=False)
    monkeypatch.setattr("ray.serve.ingress", lambda application: lambda kind: application)
    for direct in (True, False):
        application = deployment_of(monkeypatch, {"model": model, "direct": direct})["kind"]
        # Only where a replica runs is there its context.
        with pytest.raises(ConfigError if direct else RayServeException):
            application()


def test_the_installed_ray_has_the_names_that_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import serve

    version = Version(importlib.metadata.version("ray"))
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    assert ray_names.AT_ONCE.keys() <= inspect.signature(serve.delete).parameters.keys()
    assert ray_names.has_routers() == (version >= Version("2.58"))
    if not ray_names.has_routers():
        return
    from ray._private import ray_constants
    from ray.serve._private import constants, haproxy_templates, router
    from ray.serve.request_router import RunningReplica

    assert '"_reserve"' in inspect.getsource(router)
    assert isinstance(RunningReplica.backend_http_endpoint, property)
    template = inspect.getsource(haproxy_templates)
    assert "ingress_request_router_header_prefix }} -m beg" in template, "clients cannot set the router's headers"
    read_by_ray = inspect.getsource(constants) + inspect.getsource(ray_constants)
    for name in ray_names.NODES:
        assert f'"{name}"' in read_by_ray


def test_a_replica_reserves_the_gpus_of_its_ranks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def actor(**options: Any) -> dict[str, Any]:
        ranks = {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2, "backend": "pytorch"}
        return dict(deployment_of(monkeypatch, {"model": model, "options": ranks | options})["ray_actor_options"])

    assert actor()["num_gpus"] == 8
    assert KEEPS_VISIBLE_GPUS.keys().isdisjoint(actor()["runtime_env"]["env_vars"])
    spanning = actor(orchestrator_type="ray")
    assert spanning["num_gpus"] == 0
    assert KEEPS_VISIBLE_GPUS == {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, "as Ray reads it"
    assert spanning["runtime_env"]["env_vars"].items() >= KEEPS_VISIBLE_GPUS.items()
    made = deployment_of(monkeypatch, {"model": model, "gpus": 0, "options": {"backend": "pytorch"}})
    assert made["ray_actor_options"]["num_gpus"] == 0
    assert made["ray_actor_options"]["runtime_env"]["env_vars"].items() >= KEEPS_VISIBLE_GPUS.items()


def test_autoscaling_has_bounds_and_the_concurrency_that_is_asked_for(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = deployment_of(monkeypatch, {"model": model, "autoscale": "2:5:7"})
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


def cluster(monkeypatch: pytest.MonkeyPatch, *of_nodes: int) -> None:
    """This process is connected to a cluster whose nodes have these numbers of GPUs; a dead one had more."""
    nodes = [
        {"Alive": True, "NodeManagerAddress": f"10.0.0.{n}", "NodeID": f"{n}" * 20, "Resources": {"GPU": float(count)}}
        for n, count in enumerate(of_nodes, 1)
    ]
    nodes.append({**nodes[0], "Alive": False, "Resources": {"GPU": 64.0}})
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: nodes)


RANKS = {"tensor_parallel_degree": 4, "pipeline_parallel_degree": 2}
SPANNING = {"backend": "pytorch", "orchestrator_type": "ray"}


@by_rows(
    ("of_nodes", "options", "expected"),
    [
        ((), {"backend": "scripted"}, 0),
        ((), {"backend": "pytorch"}, 8),
        ((), {"backend": "auto"}, 0),
        ((), {"backend": "pytorch", "tensor_parallel_degree": "max"}, r"degree=max .* give a number, or the argument"),
        ((0, 8), {"backend": "auto"}, 8),
        ((0, 0), {"backend": "auto"}, 0),
        ((0, 4, 2), {"backend": "pytorch"}, r"8 ranks need GPUs, 8 on one, and the cluster has 0 on 10.0.0.1"),
        ((0, 0), {"backend": "pytorch"}, 8),  # nodes with GPUs are to come
        ((4, 4), SPANNING, 0),  # TensorRT-LLM reserves them itself
        *(
            (of_nodes, SPANNING, r"the same number on each node, .* 8 together")
            for of_nodes in ((0, 8), (8, 4), (2, 2), (0, 0))
        ),
    ],
)
def test_a_replica_reserves_gpus_where_its_ranks_run_on_its_node(
    of_nodes: tuple[int, ...], options: dict[str, str], expected: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_nodes:
        cluster(monkeypatch, *of_nodes)
    arguments = [f"{name}={value}" for name, value in {**RANKS, **options}.items()]
    if isinstance(expected, int):
        assert reserved_gpus(load(None, {}, arguments=arguments).options) == expected
        return
    with pytest.raises(ConfigError, match=expected):
        reserved_gpus(load(None, {}, arguments=arguments).options)


def test_ray_calls_it_with_its_own_snapshots() -> None:
    config = pytest.importorskip("ray.serve.config", reason="Ray is not installed (the extra `ray`)")
    made = config.AutoscalingPolicy(policy_function=QueueAndCachePolicy, policy_kwargs={"concurrency": 10})
    names = list(inspect.signature(config.AutoscalingContext.__init__).parameters)[1:]
    replicas = [f"replica-{number}" for number in range(2)]
    figures = {"waiting": dict.fromkeys(replicas, 5.0), "running": dict.fromkeys(replicas, 10.0)}
    known = {
        "current_num_replicas": 2,
        "aggregated_metrics": lambda: figures,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 6,
    }
    snapshot = config.AutoscalingContext(**(dict.fromkeys(names) | known))
    assert made.policy_kwargs == {"concurrency": 10}
    assert QueueAndCachePolicy(**made.policy_kwargs)(snapshot) == (3, {})
