"""`build`, the application that Ray Serve runs, and its replicas.

A replica is the server in an actor of Ray, with the hooks that Ray Serve calls by name. The arguments of `build` say
how many there are, and how many GPUs each has.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Message, Receive, Scope, Send

from djl_trtllm.api.base import Reply
from djl_trtllm.api.front_end import REQUEST_ID, front_end_error
from djl_trtllm.backends.base import backend_named
from djl_trtllm.cluster import ray_names
from djl_trtllm.cluster.ray_names import DIRECT, SEPARATE_THREAD
from djl_trtllm.config import Backend, Options
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import ConfigError, DjlTrtllmError, ModelError
from djl_trtllm.logs import configure
from djl_trtllm.routing.fleet import DEATHS
from djl_trtllm.routing.scaling import Autoscaling, QueueAndCachePolicy
from djl_trtllm.server.application import Application, plan_startup
from djl_trtllm.server.exchange import WRITE_PART, Exchange
from djl_trtllm.server.metrics import ModelFigures
from djl_trtllm.service.adapters import Adapters
from djl_trtllm.service.lifecycle import State

if TYPE_CHECKING:
    from ray import serve


logger = logging.getLogger(__name__)

_REQUEST_ID = REQUEST_ID.encode()
_OF_ROUTER = ray_names.HEADERS.encode()
_ONE_OF_MANY = (
    "a request reaches one of several replicas, and would change that one only: give adapters in the user_config of "
    "the deployment, {adapters: {NAME: FOLDER}}, and models in the arguments of the application (docs/ray.md)"
)
_MOVED_SECONDS = 2.0


class ReplicaApplication(Application):
    """The application behind Ray's middleware, which adds the header X-Request-ID: ours would be a second one.

    Both ids are the same: the middleware gives requests without an id one, and they arrive here with it. X-Replica
    names the replica, whose log has the id.
    """

    received: int = 0
    """Requests so far: with it the router knows which of those that it has sent are in a report of the load."""
    router: Any = None
    """The handle of the router that HAProxy asks, if there is one."""
    name: str = ""
    """Ray's id of the replica."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != _REQUEST_ID]
                headers.append((b"x-replica", self.name.encode()))
                message = {**message, "headers": headers}
            await send(message)

        if (write_part := ray_names.write_part(receive)) is not None:
            scope[WRITE_PART] = write_part
        refusal = await self._received(scope) if scope["type"] == "http" else None
        if refusal is not None:
            await Exchange(scope, receive, without_id, self.context).reply(refusal)
        else:
            await super().__call__(scope, receive, without_id)

    async def _received(self, scope: Scope) -> Reply | None:
        """Count a request and read what the router says about it; the reply to one that is refused."""
        self.received += 1
        if self.router is None:
            return None
        said = {name.decode(): value.decode() for name, value in scope["headers"] if name.startswith(_OF_ROUTER)}
        if (seconds := said.get(ray_names.REFUSED)) is not None:
            return front_end_error(
                400,
                f"this request has ended {DEATHS} replicas, and the same one is refused for {seconds} s: change it, "
                "and report it with the replicas' logs",
            )
        if said.get(ray_names.CHOSEN, self.name) != self.name:
            # The chosen replica has died of it, perhaps. Say it before the same happens here.
            try:
                moved = self.router.moved.remote(said.get(ray_names.DIGEST, ""), self.name)
                await asyncio.wait_for(moved, _MOVED_SECONDS)
            except Exception as error:  # of Ray, whatever it is: the request is served all the same
                logger.info("the router was not told of a request that another replica did not take: %s", error)
        return None

    def add_exception_handler(self, error: type[Exception], handler: object) -> None:
        """Ray 2.55 calls it on every application, for errors of its handles. This one has no handles."""


def open_application(model: str | None, options: Mapping[str, Any], *, shared: bool) -> ReplicaApplication:
    """The application of a replica, `shared` if there are others. It is ready when its lifespan has started."""
    plan = plan_startup(model, os.environ, as_arguments(options))
    app = ReplicaApplication(*plan, wait_until_ready=True)
    app.context.unchangeable = _ONE_OF_MANY if shared else ""
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
        raise ConfigError(problem)
    logger.warning("%s", problem)


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
            raise ConfigError(f"user_config: {error}; expected adapters, as {{adapters: {{NAME: FOLDER}}}}") from None


class Replica:
    """The hooks of a replica for Ray Serve. `serve.ingress` adds `app`, what `open_application` returned."""

    app: ReplicaApplication
    _configured = UserConfig()

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Register the adapters of `UserConfig`, and unregister those that an earlier one had.

        Requests are answered meanwhile. Raises ConfigError and InvalidRequestError for what is wrong with it.
        """
        wanted = UserConfig.parse(user_config)
        models = [model for model in self.app.registry.models.values() if model.serves_adapters]
        if wanted.adapters and not models:
            raise ConfigError("user_config has adapters, and the model has no LoRA: set option.enable_lora=true")
        # It reads files, perhaps over a network. By its source, Ray before 2.60 calls a method that is not async in the
        # event loop.
        await asyncio.to_thread(self._change, [model.adapters for model in models], wanted)

    def _change(self, of_models: Sequence[Adapters], wanted: UserConfig) -> None:
        before, after = self._configured.adapters, wanted.adapters
        for adapters in of_models:
            for name in before:
                if after.get(name) != before[name]:
                    adapters.unregister(name)
            for name, source in after.items():
                if before.get(name) != source:
                    adapters.register(name, source)
        self._configured = wanted

    def record_routing_stats(self) -> dict[str, int]:
        """Return what the router knows about this replica's load."""
        models = [ModelFigures.of(model) for model in self.app.registry.models.values()]
        return {
            "requests": sum(model.waiting + model.running for model in models),
            "received": self.app.received,
            "places": sum(model.max_running or 0 for model in models),
        }

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
        """Return what `QueueAndCachePolicy` decides by: sequences that wait and run, batches, and use of KV caches."""
        models = [ModelFigures.of(model) for model in self.app.registry.models.values()]
        return {
            "waiting": sum(model.waiting for model in models),
            "running": sum(model.running for model in models),
            "places": sum(model.max_running or 0 for model in models),
            "kv_usage": max((model.stats.kv_usage or 0.0 for model in models), default=0.0),
        }


_OPTION = "option."
_WHAT = "the arguments of djl_trtllm.cluster:build"
_MOST_ONGOING = 100_000
"""Serve's limits, beyond whatever batch and queue a server has: ours are those that refuse."""
_DRAIN_OF_HAPROXY = 40.0
"""Seconds: how long Ray keeps a replica reachable that HAProxy is to forget (30), and what ending an engine takes."""
_HEALTH_CHECK_SECONDS, _HEALTH_TIMEOUT_SECONDS = 5.0, 10.0
"""Ray ends a replica after three checks without an answer in this time. With 5 s, a busy machine lost healthy replicas.
Routers give a silent replica no requests before that."""
_STARTS = 3
"""How often a replica is started before the deployment has failed."""
_ROUTING_STATS_SECONDS = 1.0
_FORWARDED_BY_DEFAULT = ("127.0.0.1", "::1")
_DOWNSCALE_DELAY = 300
KEEPS_VISIBLE_GPUS = {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
"""The environment of a replica that sees all GPUs although it has reserved none: Ray 2.55 would hide them, and
TensorRT-LLM passes a replica's environment to ranks on other nodes."""


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
            raise ConfigError(f"{_WHAT}: {error}; there are {', '.join(cls.__struct_fields__)}") from None
        if arguments.autoscale is not None and "replicas" in named:
            raise ConfigError(f"{_WHAT} have replicas and autoscale: leave one out")
        return arguments

    @property
    def most_replicas(self) -> int:
        """How many replicas there may be at a time."""
        return self.replicas if self.autoscale is None else Autoscaling.parse(self.autoscale).most

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
    require_known_clients(options)
    routed = arguments.most_replicas > 1 and ray_names.has_routers()
    router_name = f"{arguments.name}{ray_names.ROUTER}"

    def application() -> Application:
        app = open_application(arguments.model, arguments.options, shared=arguments.most_replicas > 1)
        require_direct(asked=arguments.direct)
        context = ray_serve.get_replica_context()
        app.name = context.replica_id.to_full_id_str()
        if routed:
            app.router = ray_serve.get_deployment_handle(router_name, context.app_name)
        return app

    kind = Replica if arguments.autoscale is None else AutoscaledReplica
    deployment = ray_serve.deployment(
        ray_serve.ingress(application)(kind),
        name=arguments.name,
        max_ongoing_requests=_MOST_ONGOING,
        graceful_shutdown_timeout_s=drain_seconds(options),
        health_check_period_s=_HEALTH_CHECK_SECONDS,
        health_check_timeout_s=_HEALTH_TIMEOUT_SECONDS,
        max_constructor_retry_count=_STARTS,
        ray_actor_options=_resources(arguments, options),
        **_number_of_replicas(arguments),
    )
    if not routed:
        return deployment.bind()
    from ray.serve.config import RequestRouterConfig

    from djl_trtllm.cluster.router import PrefixRouter, Router

    config = RequestRouterConfig(
        request_router_class=PrefixRouter, request_routing_stats_period_s=_ROUTING_STATS_SECONDS
    )
    replicas = deployment.options(request_router_config=config).bind()
    router = ray_serve.deployment(
        ray_serve.ingress()(Router),
        name=router_name,
        max_ongoing_requests=_MOST_ONGOING,
        logging_config={"log_level": "WARNING", "enable_access_log": False},  # the replica's log has each request
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": ray_names.OF_ROUTERS}},
    ).bind(replicas)
    return ray_names.with_router(replicas, router)


def require_known_clients(options: Options) -> None:
    """Raise ConfigError for limits of clients that cannot be known: HAProxy does not pass on a client's address."""
    known = options.api_keys_file or options.client_header or _proxies(options)
    if options.max_requests_per_client and not known:
        raise ConfigError(
            "max_requests_per_client counts clients by their addresses, and on Ray all have that of HAProxy: name "
            "api_keys_file, or a client_header that a gateway sets, or the addresses of the load balancer and of the "
            "nodes as forwarded_allow_ips"
        )


def _proxies(options: Options) -> str:
    """The addresses whose X-Forwarded-For counts, for Ray's uvicorn; by default none, not even this machine's.

    HAProxy is on this machine and passes on what a client has written there.
    """
    given = options.forwarded_allow_ips
    return "" if given == _FORWARDED_BY_DEFAULT else ",".join(given)


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
    gpus = reserved_gpus(options) if arguments.gpus is None else arguments.gpus
    visible = {} if gpus and options.orchestrator_type != "ray" else KEEPS_VISIBLE_GPUS
    return {
        "num_cpus": arguments.cpus,
        "num_gpus": gpus,
        "runtime_env": {"env_vars": {SEPARATE_THREAD: "0", "FORWARDED_ALLOW_IPS": _proxies(options), **visible}},
    }


def reserved_gpus(options: Options) -> int:
    """GPUs that a replica reserves on its node. With orchestrator_type=ray, TensorRT-LLM reserves those of its ranks.

    Raises ConfigError where the nodes of the cluster that this process is connected to cannot have them.
    """
    of_nodes = _gpus_of_nodes()
    on_gpus = any(of_nodes.values()) if options.backend is Backend.AUTO else backend_named(options.backend).has_gpus
    if not on_gpus:
        return 0
    ranks = options.ranks
    if ranks is None:
        raise ConfigError(
            "option.tensor_parallel_degree=max does not say how many GPUs a replica reserves: give a number, or the "
            "argument gpus"
        )
    ranks_are_actors = options.orchestrator_type == "ray"
    if of_nodes:
        _require_room(ranks, of_nodes, spanning=ranks_are_actors)
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


def _require_room(ranks: int, of_nodes: Mapping[str, int], *, spanning: bool) -> None:
    """Raise ConfigError if the nodes have no room for this number of ranks, unless nodes with GPUs may still join.

    `spanning`: TensorRT-LLM 1.2 makes a placement group whose bundles have as many GPUs as Ray's first node, with the
    first bundle on the node of the replica. So all nodes must have the same number of GPUs.
    """
    counts = of_nodes.values()
    alike = 0 < min(counts) == max(counts)
    if alike and sum(counts) >= ranks if spanning else ranks <= (max(counts) or ranks):
        return
    wanted = f"the same number on each node, the head included, and {ranks} together" if spanning else f"{ranks} on one"
    shown = ", ".join(f"{count} on {node}" for node, count in of_nodes.items())
    raise ConfigError(
        f"{ranks} ranks need GPUs, {wanted}, and the cluster has {shown}: change the parallel degrees, let them span "
        f"nodes with option.orchestrator_type=ray (docs/ray.md), or give the argument gpus: {ranks} if larger nodes "
        "are to come"
    )


def _number_of_replicas(arguments: ClusterArguments) -> dict[str, Any]:
    if arguments.autoscale is None:
        return {"num_replicas": arguments.replicas}
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

    scaling = Autoscaling.parse(arguments.autoscale)
    policy = AutoscalingPolicy(policy_function=QueueAndCachePolicy, policy_kwargs={"concurrency": scaling.concurrency})
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.least, max_replicas=scaling.most, policy=policy, downscale_delay_s=_DOWNSCALE_DELAY
        )
    }
