"""A replica: the server in an actor of Ray, with the hooks that Ray Serve calls by name."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from djl_trtllm.api.front_end import REQUEST_ID, front_end_error
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.errors import ConfigError, ModelError
from djl_trtllm.logs import configure
from djl_trtllm.server.application import Application, plan_startup
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.metrics import ModelFigures
from djl_trtllm.service import State

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
            "kv_usage": max((model.kv_usage or 0.0 for model in models), default=0.0),
        }
