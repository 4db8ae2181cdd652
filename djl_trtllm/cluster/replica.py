"""A replica: the server in an actor of Ray, with the hooks that Ray Serve calls by name."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import AsyncGenerator, Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace
from starlette.types import Message, Receive, Scope, Send

from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.api.headers import REQUEST_ID
from djl_trtllm.cluster.arguments import ModelArguments
from djl_trtllm.cluster.forwarding import ForwardedRequest, Head, answer
from djl_trtllm.cluster.ingress import problem_of_ingress
from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.errors import ConfigError, ModelError
from djl_trtllm.logs import configure
from djl_trtllm.server.application import Application
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.model_figures import ModelFigures
from djl_trtllm.server.startup import plan_startup
from djl_trtllm.service import State

logger = logging.getLogger(__name__)

_REQUEST_ID = REQUEST_ID.encode()
REPLICA = "x-replica"
"""The response header that names the replica, as Ray's log does."""


_MANAGED = re.compile(r"/models(/[^/]+)?|(/models/[^/]+)?/adapters(/[^/]+)?")
_ONE_OF_MANY = front_end_error(
    400,
    "a request reaches one of several replicas, and would change that one only: give adapters in the user_config of "
    "the deployment, {adapters: {NAME: FOLDER}}, and models in the arguments of the application (docs/ray.md)",
)


class ReplicaApplication(Application):
    """The application behind Ray's middleware, which adds a request's id to the response: ours would be a second one.

    Both are the same: the middleware gives requests without an id one, and they arrive here with it.
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
            await Exchange(scope, receive, without_id, self.options, self.context.counts).reply(_ONE_OF_MANY)
        else:
            await super().__call__(scope, receive, without_id)

    def add_exception_handler(self, error: type[Exception], handler: object) -> None:
        """Ray 2.55 calls it on every application, for errors of its handles. This one has no handles."""


def open_application(arguments: ModelArguments) -> ReplicaApplication:
    """The application of a replica. It is ready to serve when its lifespan has started."""
    plan = plan_startup(arguments.model, os.environ, as_arguments(arguments.options))
    app = ReplicaApplication(*plan, wait_until_ready=True)
    app.shared = arguments.most_replicas > 1
    configure(str(app.options.log_level), json=app.options.log_format == "json")
    return app


def require_direct(*, asked: bool) -> None:
    """Warn if clients do not reach this process directly; raise ConfigError if that was `asked` for."""
    if (problem := problem_of_ingress(os.environ)) is not None:
        if asked:
            raise ConfigError([problem])
        logger.warning("%s", problem)


def _changes_one_replica(scope: Scope) -> bool:
    """Whether a request of the management API would change what this replica serves, and no other one."""
    path = scope["path"].removeprefix(scope.get("root_path", ""))
    return scope["method"] in ("POST", "PUT", "DELETE") and _MANAGED.fullmatch(path) is not None


class UserConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What may change while replicas run: `user_config` of the deployment.

    `adapters` are sources by name: folders below the model's `adapters`, or below a root (docs/http-api.md).
    """

    adapters: dict[str, str] = {}

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> UserConfig:
        """Raises ConfigError."""
        try:
            return msgspec.convert(given, cls)
        except msgspec.ValidationError as error:
            raise ConfigError([f"user_config: {error}; it has adapters, as NAME: FOLDER"]) from None


class Replica:
    """What Ray Serve knows of a replica. `serve.ingress` adds `app`, what `open_application` returned."""

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
        """Raise ModelError if a model has failed for good: Ray ends the replica and starts another one.

        A model that recovers from a lost engine process is not unhealthy.
        """
        for model in self.app.registry.models.values():
            if model.at_startup and model.state is State.FAILED:
                raise ModelError(f"model {model.name} has failed: {model.failure}")

    def record_routing_stats(self) -> dict[str, float]:
        """Sequences that wait and run, and the share of the KV cache that is used."""
        models = [ModelFigures.of(model) for model in self.app.registry.models.values()]
        return {
            "waiting": sum(model.waiting for model in models),
            "running": sum(model.running for model in models),
            "kv_usage": max((model.kv_usage or 0.0 for model in models), default=0.0),
        }


class AutoscaledReplica(Replica):
    """A replica of a deployment with autoscaling. Ray 2.55 does not start one of another deployment."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What `QueueAndCachePolicy` decides by."""
        return self.record_routing_stats()


class _BehindGateway:
    """A replica that is not the ingress deployment, of which Ray allows one: it has no address, and is called."""

    app: Application

    async def __init__(self, arguments: ModelArguments) -> None:  # type: ignore[misc]  # Ray awaits it
        """Returns when the application is ready to serve. Raises DjlTrtllmError."""
        # The gateway has no live page: `/` is not to say that there is one.
        self.app = open_application(replace(arguments, options={**arguments.options, "monitor": False}))
        from ray import serve

        self._named = (REPLICA.encode(), serve.get_replica_context().replica_id.unique_id.encode())
        self._lifespan = self.app.lifespan()
        await self._lifespan.__aenter__()

    async def answer(self, request: ForwardedRequest) -> AsyncGenerator[Head | bytes, None]:
        """The response to a request of a gateway (`forwarding.answer`)."""
        async with contextlib.aclosing(answer(self.app, request)) as parts:
            async for part in parts:
                if isinstance(part, Head):
                    part.headers.append(self._named)
                yield part

    async def __del__(self) -> None:
        """Ray calls it when the replica ends and its requests have."""
        if hasattr(self, "_lifespan"):
            await self._lifespan.__aexit__(None, None, None)


class ReplicaBehindGateway(_BehindGateway, Replica):
    """A replica that gateways call."""


class AutoscaledReplicaBehindGateway(_BehindGateway, AutoscaledReplica):
    """The same, of a deployment with autoscaling."""


class GatewayReplica:
    """What Ray Serve knows of a gateway. The deployments that it is bound to belong to its application."""

    def __init__(self, *deployments: object) -> None:
        """The gateway asks for them by name: such handles have the settings of its own process."""
