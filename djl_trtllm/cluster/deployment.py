"""`build`: the application that Ray Serve runs."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from djl_trtllm.cluster.arguments import ClusterArguments
from djl_trtllm.cluster.autoscaling import QueueAndCachePolicy
from djl_trtllm.cluster.ingress import SEPARATE_THREAD
from djl_trtllm.cluster.replica import AutoscaledReplica, Replica, open_application
from djl_trtllm.config import Backend, Options
from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.model.remote.aws_scaling import Autoscaling
from djl_trtllm.server.application import Application
from djl_trtllm.server.startup import plan_startup

if TYPE_CHECKING:
    from ray import serve

_WITHOUT_GPU = (Backend.OPENVINO, Backend.SCRIPTED)
_BESIDES = 100
"""Requests of a replica that are no generation, or are being refused."""
_DRAIN_OF_HAPROXY = 40.0
"""Seconds: how long Ray keeps a replica reachable that HAProxy is to forget (30), and what ending an engine takes."""


def build(args: Mapping[str, Any]) -> serve.Application:
    """An application of Ray Serve, for `serve run djl_trtllm.cluster:build`, its configuration files and RayService.

    `args` are `ClusterArguments`. Raises ConfigError for what is wrong with them or with the options.
    """
    require_ray()
    from ray import serve

    arguments = ClusterArguments.parse(args)
    options = plan_startup(arguments.model, os.environ, as_arguments(arguments.options))[0]

    def application() -> Application:
        return open_application(arguments)

    kind = Replica if arguments.autoscale is None else AutoscaledReplica
    deployment = serve.deployment(serve.ingress(application)(kind), **_deployment_options(arguments, options))
    return deployment.bind()


def require_ray() -> Any:
    """The package `ray`. Raises DjlTrtllmError if it, or its extra `serve`, is not installed."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise DjlTrtllmError(f"Ray Serve is not installed ({error}): pip install 'djl-trtllm[ray]'") from error
    return ray


def _deployment_options(arguments: ClusterArguments, options: Options) -> dict[str, Any]:
    """The arguments of `serve.deployment`. Serve's own limits are beyond ours, so that ours are those that refuse."""
    at_once = options.max_rolling_batch_size + options.job_queue_size
    return {
        "name": arguments.name,
        "max_ongoing_requests": at_once + _BESIDES,
        "graceful_shutdown_timeout_s": options.shutdown_timeout + _DRAIN_OF_HAPROXY,
        "ray_actor_options": {
            "num_cpus": arguments.cpus,
            "num_gpus": _gpus(options) if arguments.gpus is None else arguments.gpus,
            "runtime_env": {"env_vars": {SEPARATE_THREAD: "0"}},
        },
        **_replicas(arguments, options),
    }


def _replicas(arguments: ClusterArguments, options: Options) -> dict[str, Any]:
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


def _gpus(options: Options) -> int:
    """GPUs that a replica reserves. With orchestrator_type=ray, TensorRT-LLM reserves those of its ranks itself."""
    import ray

    if options.backend in _WITHOUT_GPU or options.orchestrator_type is Orchestrator.RAY:
        return 0
    if options.backend is Backend.AUTO and not (ray.is_initialized() and ray.cluster_resources().get("GPU")):
        return 0
    degrees = (options.tensor_parallel_degree, options.pipeline_parallel_degree, options.context_parallel_size)
    if "max" in degrees:
        raise ConfigError(
            [
                "option.tensor_parallel_degree=max does not say how many GPUs a replica reserves: give a number, or "
                "the argument gpus"
            ]
        )
    return math.prod(int(degree) for degree in degrees)
