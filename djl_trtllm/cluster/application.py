"""`build`, the application that Ray Serve runs, and its replicas.

A replica is the server in an actor of Ray, with the hooks that Ray Serve calls by name. The arguments of `build` say
how many there are, and how many GPUs each has.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta
from starlette.types import Message, Receive, Scope, Send

from djl_trtllm.api.front_end import REQUEST_ID, front_end_error
from djl_trtllm.config import Backend, Options
from djl_trtllm.config.options.choices import Orchestrator
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import ConfigError, DjlTrtllmError, ModelError
from djl_trtllm.logs import configure
from djl_trtllm.server.application import Application, plan_startup
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.metrics import ModelFigures
from djl_trtllm.service.lifecycle import State

if TYPE_CHECKING:
    from ray import serve
    from ray.serve.config import AutoscalingContext


logger = logging.getLogger(__name__)

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
SEPARATE_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
DIRECT = {HAPROXY: "1", SEPARATE_THREAD: "0"}
"""The environment of all nodes with which clients reach replicas directly: through HAProxy, with the server's event
loop as the replica's own."""
NODES = {
    **DIRECT,
    # HAProxy asks another replica if one dies before it has answered.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # It starts anew at each change of the replicas; the one before keeps its streams for this number of seconds.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # The default of Ray 2.60. For that of 2.55, 20000, most machines allow too few open files, and it does not start.
    "RAY_SERVE_HAPROXY_MAXCONN": "4096",
}
"""The environment that all nodes should have."""

_REQUEST_ID = REQUEST_ID.encode()
_MANAGED = re.compile(r"/models(/[^/]+)?|(/models/[^/]+)?/adapters(/[^/]+)?")
_ONE_OF_MANY = front_end_error(
    400,
    "a request reaches one of several replicas, and would change that one only: give adapters in the user_config of "
    "the deployment, {adapters: {NAME: FOLDER}}, and models in the arguments of the application (docs/ray.md)",
)


class ReplicaApplication(Application):
    """The application behind Ray's middleware, which adds the header X-Request-ID: ours would be a second one.

    Both ids are the same: the middleware gives requests without an id one, and they arrive here with it.
    """

    shared: bool = False
    """Whether there are other replicas."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != _REQUEST_ID]
                message = {**message, "headers": headers}
            await send(message)

        if self.shared and scope["type"] == "http" and _changes_one_replica(scope):
            await Exchange(scope, receive, without_id, self.context).reply(_ONE_OF_MANY)
        else:
            await super().__call__(scope, receive, without_id)

    def add_exception_handler(self, error: type[Exception], handler: object) -> None:
        """Ray 2.55 calls it on every application, for errors of its handles. This one has no handles."""


def open_application(model: str | None, options: Mapping[str, Any], *, shared: bool) -> ReplicaApplication:
    """The application of a replica, `shared` if there are others. It is ready when its lifespan has started."""
    plan = plan_startup(model, os.environ, as_arguments(options))
    app = ReplicaApplication(*plan, wait_until_ready=True)
    app.shared = shared
    configure(str(app.options.log_level), json=app.options.log_format == "json")
    return app


def require_direct(*, asked: bool) -> None:
    """Warn if clients do not reach this process directly; raise ConfigError if that was `asked` for."""
    wrong = [f"{name}={value}" for name, value in DIRECT.items() if os.environ.get(name) != value]
    if not wrong:
        return
    problem = (
        "Ray Serve's own proxy is between this replica and its clients: streams of clients that do not read are not "
        "held back, stream_write_timeout has no effect, and tokens pass another process. Set "
        f"{' and '.join(wrong)} on all nodes"
    )
    if asked:
        raise ConfigError([problem])
    logger.warning("%s", problem)


def _changes_one_replica(scope: Scope) -> bool:
    """Whether a request of the management API would change what this replica serves, and no other one."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] in ("POST", "PUT", "DELETE") and _MANAGED.fullmatch(path) is not None


class UserConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The `user_config` of the deployment, which may change while replicas run.

    `adapters` are sources by name: folders below the model's `adapters`, or below a root (docs/http-api.md).
    """

    adapters: dict[str, str] = {}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> UserConfig:
        """Check a user_config. Raises ConfigError."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError([f"user_config: {error}; it has adapters, as NAME: FOLDER"]) from None


class Replica:
    """The hooks of a replica for Ray Serve. `serve.ingress` adds `app`, what `open_application` returned."""

    app: Application
    _adapters: Mapping[str, str] = MappingProxyType({})

    def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Register the adapters of `UserConfig`, and unregister those that an earlier one had.

        Raises ConfigError and InvalidRequestError for what is wrong with it.
        """
        wanted = UserConfig.parse(user_config).adapters
        models = [model for model in self.app.registry.models.values() if model.serves_adapters]
        if wanted and not models:
            raise ConfigError(["user_config has adapters, and the model has no LoRA: set option.enable_lora=true"])
        for model in models:
            for name, source in self._adapters.items():
                if wanted.get(name) != source:
                    model.adapters.unregister(name)
            for name, source in wanted.items():
                if self._adapters.get(name) != source:
                    model.adapters.register(name, source)
        self._adapters = wanted

    def check_health(self) -> None:
        """Raise ModelError if a model has failed: Ray ends the replica and starts another one, elsewhere perhaps.

        A model that recovers from a lost engine process is not unhealthy.
        """
        for model in self.app.registry.models.values():
            if model.at_startup and model.state is State.FAILED:
                raise ModelError(f"model {model.name} has failed: {model.failure}")


class AutoscaledReplica(Replica):
    """A replica of a deployment with autoscaling. Ray 2.55 does not start one of another deployment."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what `QueueAndCachePolicy` decides by: sequences that wait and run, and the use of the KV cache."""
        models = [ModelFigures.of(model) for model in self.app.registry.models.values()]
        return {
            "waiting": sum(model.waiting for model in models),
            "running": sum(model.running for model in models),
            "kv_usage": max((model.stats.kv_usage or 0.0 for model in models), default=0.0),
        }


_OPTION = "option."
_WHAT = "the arguments of djl_trtllm.cluster:build"
_BESIDES = 100
"""Room in Serve's limit for requests that generate nothing, or are being refused."""
_DRAIN_OF_HAPROXY = 40.0
"""Seconds: how long Ray keeps a replica reachable that HAProxy is to forget (30), and what ending an engine takes."""
_DOWNSCALE_DELAY = 300
_MOST_REPLICAS, _MOST_CONCURRENT = 10_000, 100_000
_FULL_CACHE = 0.95
"""Above this utilisation of its KV cache an engine pauses sequences, even in small batches."""
_WITHOUT_GPU = (Backend.OPENVINO, Backend.SCRIPTED)
KEEPS_VISIBLE_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""The environment of a replica that reserves no GPU, and whose engine has its ranks on other nodes: Ray would hide the
GPUs from it, and TensorRT-LLM gives its environment to all ranks."""


def target_concurrency(batch_size: int) -> int:
    """Return how many sequences a replica is to have; with more, another one is started before they have to wait."""
    return max(1, round(0.7 * batch_size))


class Autoscaling(NamedTuple):
    """From `least` to `most` replicas, with as many sequences at the same time on each of them as `concurrency`."""

    least: int
    most: int
    concurrency: int

    @classmethod
    def parse(cls, text: str, batch_size: int) -> Autoscaling:
        """Read `MIN:MAX[:CONCURRENCY]`; by default, `target_concurrency` is. Raises ConfigError."""
        parts = text.split(":")
        if len(parts) not in (2, 3):
            raise ConfigError([f"autoscale={text}: expected MIN:MAX or MIN:MAX:CONCURRENCY, such as 1:4:45"])
        least = _whole(parts[0], text, "MIN", 1, _MOST_REPLICAS)
        most = _whole(parts[1], text, "MAX", least, _MOST_REPLICAS)
        given = _whole(parts[2], text, "CONCURRENCY", 1, _MOST_CONCURRENT) if parts[2:] else None
        return cls(least, most, target_concurrency(batch_size) if given is None else given)


def _whole(part: str, text: str, name: str, low: int, high: int) -> int:
    if not (part.isascii() and part.isdecimal() and len(part) < 10 and low <= int(part) <= high):
        raise ConfigError([f"autoscale={text}: {name} is {part!r}, expected a whole number from {low} to {high}"])
    return int(part)


class ClusterArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of `build`: a model, and with how many replicas it is served.

    `model` and `options` are those of `create_app`. The model has the same path on all nodes, or an address.
    """

    model: str | None = None
    options: dict[str, Any] = {}
    replicas: Annotated[int, Meta(ge=1)] = 1
    autoscale: str | None = None
    """`MIN:MAX[:CONCURRENCY]` (`Autoscaling`) instead of a fixed number of replicas."""
    gpus: Annotated[int, Meta(ge=0)] | None = None
    """GPUs of a replica. By default what the options say (`reserved_gpus`)."""
    cpus: Annotated[float, Meta(ge=0)] = 1.0
    """CPUs of a replica, as Ray counts them."""
    name: Annotated[str, Meta(min_length=1)] = "djl-trtllm"
    """The name of the deployment."""
    direct: bool = False
    """Refuse to start a replica that clients do not reach directly, instead of a warning (docs/ray.md)."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ClusterArguments:
        """Check the arguments of a configuration file, or of `serve run`, which are all texts.

        There, options are `option.NAME=VALUE`. Raises ConfigError.
        """
        named = {name: value for name, value in given.items() if not name.startswith(_OPTION)}
        options = {name: value for name, value in given.items() if name.startswith(_OPTION)}
        if options:
            named["options"] = {**named.get("options", {}), **options}
        try:
            arguments = msgspec.convert(named, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError([f"{_WHAT}: {error}; there are {', '.join(cls.__struct_fields__)}"]) from None
        if arguments.autoscale is not None and "replicas" in named:
            raise ConfigError([f"{_WHAT} have replicas and autoscale: leave one out"])
        return arguments

    @property
    def most_replicas(self) -> int:
        """How many replicas there may be at a time."""
        return self.replicas if self.autoscale is None else Autoscaling.parse(self.autoscale, 1).most

    @property
    def cpus_at_most(self) -> float:
        """CPUs that all replicas reserve, as Ray counts them."""
        return self.cpus * self.most_replicas

    def resolved(self) -> Options:
        """The options of the server and its model. Raises ConfigError."""
        return plan_startup(self.model, os.environ, as_arguments(self.options))[0]


def build(args: Mapping[str, Any]) -> serve.Application:
    """An application of Ray Serve, for `serve run djl_trtllm.cluster:build`, its configuration files and RayService.

    `args` are `ClusterArguments`. Raises ConfigError for what is wrong with them or with the options.
    """
    ray_serve = require_ray().serve
    arguments = ClusterArguments.parse(args)
    options = arguments.resolved()

    def application() -> Application:
        app = open_application(arguments.model, arguments.options, shared=arguments.most_replicas > 1)
        require_direct(asked=arguments.direct)
        return app

    kind = Replica if arguments.autoscale is None else AutoscaledReplica
    return ray_serve.deployment(
        ray_serve.ingress(application)(kind),
        name=arguments.name,
        # Serve's limit is beyond ours, so that ours are those that refuse.
        max_ongoing_requests=options.max_rolling_batch_size + options.job_queue_size + _BESIDES,
        graceful_shutdown_timeout_s=drain_seconds(options),
        ray_actor_options=_resources(arguments, options),
        **_number_of_replicas(arguments, options),
    ).bind()


def drain_seconds(options: Options) -> float:
    """How long a replica that is removed may take to end."""
    return options.shutdown_timeout + _DRAIN_OF_HAPROXY


def require_ray() -> Any:
    """The package `ray`. Raises DjlTrtllmError if it, or its extra `serve`, is not installed."""
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise DjlTrtllmError(f"Ray Serve is not installed ({error}): pip install 'djl-trtllm[ray]'") from error
    return ray


def _resources(arguments: ClusterArguments, options: Options) -> dict[str, Any]:
    """Return what Ray reserves for the actor of a replica, and its environment."""
    ranks_elsewhere = KEEPS_VISIBLE_GPUS if options.orchestrator_type is Orchestrator.RAY else {}
    return {
        "num_cpus": arguments.cpus,
        "num_gpus": reserved_gpus(options) if arguments.gpus is None else arguments.gpus,
        "runtime_env": {"env_vars": {SEPARATE_THREAD: "0", **ranks_elsewhere}},
    }


def reserved_gpus(options: Options) -> int:
    """GPUs that a replica reserves on its node. With orchestrator_type=ray, TensorRT-LLM reserves those of its ranks.

    Raises ConfigError where the nodes of the cluster that this process is connected to cannot have them.
    """
    if options.backend in _WITHOUT_GPU:
        return 0
    of_nodes = _gpus_of_nodes()
    if options.backend is Backend.AUTO and not any(of_nodes.values()):
        return 0
    degrees = (options.tensor_parallel_degree, options.pipeline_parallel_degree, options.context_parallel_size)
    if "max" in degrees:
        raise ConfigError(
            [
                "option.tensor_parallel_degree=max does not say how many GPUs a replica reserves: give a number, or "
                "the argument gpus"
            ]
        )
    ranks = math.prod(int(degree) for degree in degrees)
    ranks_are_actors = options.orchestrator_type is Orchestrator.RAY
    if of_nodes and (problem := _problem_of_nodes(ranks, of_nodes, spanning=ranks_are_actors)):
        raise ConfigError([problem])
    return 0 if ranks_are_actors else ranks


def _gpus_of_nodes() -> dict[str, int]:
    """The numbers of GPUs by the addresses of the nodes that are alive; empty without a cluster."""
    import ray

    if not ray.is_initialized():
        return {}
    alive = [node for node in ray.nodes() if node["Alive"]]
    return {
        node["NodeManagerAddress"] + ":" + node["NodeID"][:6]: int(node["Resources"].get("GPU", 0)) for node in alive
    }


def _problem_of_nodes(ranks: int, of_nodes: Mapping[str, int], *, spanning: bool) -> str | None:
    """Why this number of ranks does not fit; None if it does, or if nodes are to come.

    `spanning`: TensorRT-LLM 1.2 makes a placement group of bundles with as many GPUs as the first node has that Ray
    lists, the first of them on the node of the replica. So every node has to be like it.
    """
    most = max(of_nodes.values())
    shown = ", ".join(f"{count} on {node}" for node, count in of_nodes.items())
    if spanning and (min(of_nodes.values()) < most or not most or sum(of_nodes.values()) < ranks):
        return (
            f"option.orchestrator_type=ray with {ranks} ranks: TensorRT-LLM expects the same number of GPUs on each "
            f"node, the head included, and at least {ranks} together. The cluster has {shown}"
        )
    if not spanning and 0 < most < ranks:
        return (
            f"a replica reserves {ranks} GPUs on one node, and no node has more than {most}: {shown}. Lower the "
            "parallel degrees, or let the ranks span nodes with option.orchestrator_type=ray (docs/ray.md). If larger "
            f"nodes are to come, give the argument gpus: {ranks}"
        )
    return None


def _number_of_replicas(arguments: ClusterArguments, options: Options) -> dict[str, Any]:
    if arguments.autoscale is None:
        return {"num_replicas": arguments.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    scaling = Autoscaling.parse(arguments.autoscale, options.max_rolling_batch_size)
    policy = AutoscalingPolicy(policy_function=QueueAndCachePolicy, policy_kwargs={"concurrency": scaling.concurrency})
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.least, max_replicas=scaling.most, policy=policy, downscale_delay_s=_DOWNSCALE_DELAY
        )
    }


class QueueAndCachePolicy:
    """Ray Serve's autoscaling policy: replicas = sequences that wait or run / `concurrency`, rounded up.

    A replica whose KV cache is full counts as one that has twice as many. Ray applies the delays of its configuration
    to what this returns. A decision adds two replicas or doubles them, and ends a fifth of them, at most: the queue of
    a moment says little about how many will be needed once new replicas have loaded their model.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and no state."""
        metrics = context.aggregated_metrics or {}
        load = sum(sum(metrics.get(name, {}).values()) for name in ("waiting", "running"))
        full = sum(usage >= _FULL_CACHE for usage in metrics.get("kv_usage", {}).values())
        wanted = math.ceil(load / self._concurrency)
        present = context.current_num_replicas
        if full:
            wanted = max(wanted, present + full)
        wanted = max(present - max(1, present // 5), min(max(present + 2, 2 * present), wanted))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}
