"""A replica: the server in an actor of Ray, with the hooks that Ray Serve calls by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from djl_trtllm.api.headers import REQUEST_ID
from djl_trtllm.cluster.arguments import ClusterArguments
from djl_trtllm.cluster.ingress import problem_of_ingress
from djl_trtllm.config.sources.keywords import as_arguments
from djl_trtllm.errors import ConfigError, ModelError
from djl_trtllm.logs import configure
from djl_trtllm.server.application import Application
from djl_trtllm.server.model_figures import ModelFigures
from djl_trtllm.server.startup import plan_startup
from djl_trtllm.service import State

logger = logging.getLogger(__name__)

_REQUEST_ID = REQUEST_ID.encode()


class ReplicaApplication(Application):
    """The application behind Ray's middleware, which adds a request's id to the response: ours would be a second one.

    Both are the same: the middleware gives requests without an id one, and they arrive here with it.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [(name, value) for name, value in message["headers"] if name != _REQUEST_ID]
                message = {**message, "headers": headers}
            await send(message)

        await super().__call__(scope, receive, without_id)

    def add_exception_handler(self, error: type[Exception], handler: object) -> None:
        """Ray 2.55 calls it on every application, for errors of its handles. This one has no handles."""


def open_application(arguments: ClusterArguments) -> Application:
    """The application of a replica. It is ready to serve when its lifespan has started.

    Raises ConfigError if clients do not reach the replica directly and `arguments.direct` asks for that.
    """
    plan = plan_startup(arguments.model, os.environ, as_arguments(arguments.options))
    app = ReplicaApplication(*plan, wait_until_ready=True)
    configure(str(app.options.log_level), json=app.options.log_format == "json")
    if (problem := problem_of_ingress(os.environ)) is not None:
        if arguments.direct:
            raise ConfigError([problem])
        logger.warning("%s", problem)
    return app


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
