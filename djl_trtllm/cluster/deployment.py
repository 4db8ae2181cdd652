"""`build`: the application that Ray Serve runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from djl_trtllm.cluster.arguments import GATEWAY, ClusterArguments, ModelArguments, Routing
from djl_trtllm.cluster.autoscaling import QueueAndCachePolicy
from djl_trtllm.cluster.gpus import KEEPS_VISIBLE_GPUS, reserved_gpus
from djl_trtllm.cluster.ingress import BEHIND_GATEWAYS, GATEWAYS, SEPARATE_THREAD
from djl_trtllm.cluster.replica import (
    AutoscaledReplica,
    AutoscaledReplicaBehindGateway,
    GatewayReplica,
    Replica,
    ReplicaBehindGateway,
    open_application,
    require_direct,
)
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.logs import configure
from djl_trtllm.model.remote.aws_scaling import Autoscaling
from djl_trtllm.server.application import Application
from djl_trtllm.server.startup import plan_startup

if TYPE_CHECKING:
    from ray import serve

_BESIDES = 100
"""Requests of a replica that are no generation, or are being refused."""
_DRAIN_OF_HAPROXY = 40.0
"""Seconds: how long Ray keeps a replica reachable that HAProxy is to forget (30), and what ending an engine takes."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """An application of Ray Serve, for `serve run djl_trtllm.cluster:build`, its configuration files and RayService.

    `args` are `ClusterArguments`. Raises ConfigError for what is wrong with them or with the options.
    """
    require_ray()
    arguments = ClusterArguments.parse(args)
    options = {name: _options(model) for name, model in arguments.deployments.items()}
    deployments = {
        name: _of_model(name, model, options[name], arguments) for name, model in arguments.deployments.items()
    }
    if arguments.path is Routing.DIRECT:
        return deployments[arguments.name]
    return _gateway(arguments, options, deployments)


def _drain_seconds(options: Options) -> float:
    return options.shutdown_timeout + _DRAIN_OF_HAPROXY


def _options(model: ModelArguments) -> Options:
    return plan_startup(model.model, os.environ, as_arguments(model.options))[0]


def _of_model(name: str, model: ModelArguments, options: Options, arguments: ClusterArguments) -> serve.Application:
    """The deployment of a model."""
    from ray import serve

    is_direct = arguments.path is Routing.DIRECT
    variables = dict({SEPARATE_THREAD: "0"} if is_direct else BEHIND_GATEWAYS)
    if options.orchestrator_type is Orchestrator.RAY:
        variables |= KEEPS_VISIBLE_GPUS
    given = {"name": name, **_deployment_options(model, options, variables)}
    if is_direct:
        asked = arguments.direct

        def application() -> Application:
            app = open_application(model)
            require_direct(asked=asked)
            return app

        kind = Replica if model.autoscale is None else AutoscaledReplica
        return serve.deployment(serve.ingress(application)(kind), **given).bind()
    given["request_router_config"] = _router(name, options)
    behind = ReplicaBehindGateway if model.autoscale is None else AutoscaledReplicaBehindGateway
    return serve.deployment(behind, **given).bind(model)


def _router(name: str, options: Options) -> Any:
    """What a gateway chooses the replicas of this deployment with."""
    from ray.serve.config import RequestRouterConfig

    # A replica may have a quarter of a batch more than another: below that, what it saves is more than others lose.
    slack = max(1, options.max_rolling_batch_size // 4)
    return RequestRouterConfig(
        request_router_class="djl_trtllm.cluster.request_router.PrefixRouter",
        request_router_kwargs={"slack": slack, "deployment": name},
    )


def _gateway(
    arguments: ClusterArguments, options: Mapping[str, Options], deployments: Mapping[str, serve.Application]
) -> serve.Application:
    """The ingress deployment before those of the models."""
    from ray import serve

    widest = max(options.values(), key=lambda each: each.max_request_size)
    prefixes, asked = arguments.path is Routing.PREFIX, arguments.direct
    names = {name: name for name in deployments}

    def application() -> Any:
        from djl_trtllm.cluster.gateway import Gateway

        configure(str(widest.log_level), json=widest.log_format == "json")
        require_direct(asked=asked)
        return Gateway(widest, names, prefixes=prefixes)

    at_once = sum(_at_once(options[name]) * model.most_replicas for name, model in arguments.deployments.items())
    return serve.deployment(
        serve.ingress(application)(GatewayReplica),
        name=GATEWAY,
        num_replicas=arguments.gateways,
        max_ongoing_requests=at_once,
        graceful_shutdown_timeout_s=max(map(_drain_seconds, options.values())),
        ray_actor_options={"num_cpus": arguments.cpus_of_gateway, "runtime_env": {"env_vars": GATEWAYS}},
    ).bind(*deployments.values())


def drain_seconds(arguments: ClusterArguments) -> float:
    """How long a replica that is removed may take to end. Raises as `build` does for what is wrong with the options."""
    return max(_drain_seconds(_options(model)) for model in arguments.deployments.values())


def require_ray() -> Any:
    """The package `ray`. Raises DjlTrtllmError if it, or its extra `serve`, is not installed."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise DjlTrtllmError(f"Ray Serve is not installed ({error}): pip install 'djl-trtllm[ray]'") from error
    return ray


def _at_once(options: Options) -> int:
    """Requests of a replica. Serve's own limits are beyond ours, so that ours are those that refuse."""
    return options.max_rolling_batch_size + options.job_queue_size + _BESIDES


def _deployment_options(arguments: ModelArguments, options: Options, variables: Mapping[str, str]) -> dict[str, Any]:
    """Those of the arguments of `serve.deployment` that say how many replicas there are, and with what."""
    return {
        "max_ongoing_requests": _at_once(options),
        "graceful_shutdown_timeout_s": _drain_seconds(options),
        "ray_actor_options": {
            "num_cpus": arguments.cpus,
            "num_gpus": reserved_gpus(options) if arguments.gpus is None else arguments.gpus,
            "runtime_env": {"env_vars": variables},
        },
        **_replicas(arguments, options),
    }


def _replicas(arguments: ModelArguments, options: Options) -> dict[str, Any]:
    if arguments.autoscale is None:
        return {"num_replicas": arguments.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    scaling = Autoscaling.parse(arguments.autoscale, options.max_rolling_batch_size)
    policy = AutoscalingPolicy(policy_function=QueueAndCachePolicy, policy_kwargs={"concurrency": scaling.concurrency})
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.least, max_replicas=scaling.most, policy=policy, downscale_delay_s=300
        )
    }
