"""The arguments of `djl_trtllm.cluster:build`."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from djl_trtllm.errors import ConfigError
from djl_trtllm.model.remote.aws_scaling import Autoscaling

_OPTION = "option."
_WHAT = "the arguments of djl_trtllm.cluster:build"
GATEWAY = "gateway"
"""The name of the deployment before those of models."""


class Routing(str, Enum):
    """What chooses the replica of a request (docs/ray.md)."""

    DIRECT = "direct"
    """HAProxy, by connections; the replica is the ingress deployment."""
    PREFIX = "prefix"
    """A gateway, by session and the beginning of the prompt."""
    LOAD = "load"
    """A gateway, by session and load: it reads no prompts."""


class ModelArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model, and with how many replicas it is served.

    `model` and `options` are those of `create_app`. The model has the same path on all nodes, or an address.
    """

    model: str | None = None
    options: dict[str, Any] = {}
    replicas: Annotated[int, Meta(ge=1)] = 1
    autoscale: str | None = None
    """`MIN:MAX[:CONCURRENCY]` as for `djl-trtllm deploy`, instead of a fixed number of replicas."""
    gpus: Annotated[int, Meta(ge=0)] | None = None
    """Of a replica. By default what the options say: tensor parallel degree x pipeline parallel degree."""
    cpus: Annotated[float, Meta(ge=0)] = 1.0
    """Of a replica, as Ray counts them."""

    @property
    def most_replicas(self) -> int:
        """Replicas at a time."""
        return self.replicas if self.autoscale is None else Autoscaling.parse(self.autoscale, 1).most


class ClusterArguments(ModelArguments, frozen=True, forbid_unknown_fields=True):
    """What a cluster serves: a model, or several `models` by name."""

    name: Annotated[str, Meta(min_length=1)] = "djl-trtllm"
    """Of the deployment of a single model; several have their own names."""
    models: dict[Annotated[str, Meta(pattern=r"^[\w.:@-]+$")], ModelArguments] = {}
    routing: Routing | None = None
    """By default direct, or prefix if there are several models."""
    gateways: Annotated[int, Meta(ge=1)] = 1
    """Processes that route, unless it is direct."""
    direct: bool = False
    """Refuse to start a replica that clients do not reach directly, instead of a warning (docs/ray.md)."""

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> ClusterArguments:
        """Check the arguments of a configuration file, or of `serve run`, which are all texts.

        There, options are `option.NAME=VALUE`. Raises ConfigError.
        """
        named = _with_options(given)
        if type(named.get("models")) is dict:
            named["models"] = {
                name: _with_options(model) if isinstance(model, Mapping) else model
                for name, model in named["models"].items()
            }
        try:
            arguments = msgspec.convert(named, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError([f"{_WHAT}: {error}; there are {', '.join(cls.__struct_fields__)}"]) from None
        if problem := arguments._problem(named):
            raise ConfigError([f"{_WHAT} {problem}"])
        return arguments

    def _problem(self, named: Mapping[str, Any]) -> str | None:
        for model in (named, *named.get("models", {}).values()):
            if model.get("autoscale") is not None and "replicas" in model:
                return "have replicas and autoscale: leave one out"
        if not self.models:
            return None
        if outside := [name for name in ModelArguments.__struct_fields__ if name in named]:
            return f"have models and {', '.join(outside)}: give each of the models its own"
        if self.routing is Routing.DIRECT:
            return "have models and routing=direct, which does not read what a request asks for: leave routing out"
        if GATEWAY in self.models:
            return f"have a model named {GATEWAY}, the name of what routes: choose another"
        return None

    @property
    def path(self) -> Routing:
        """`routing`, or its default."""
        return self.routing or (Routing.PREFIX if self.models else Routing.DIRECT)

    @property
    def deployments(self) -> dict[str, ModelArguments]:
        """The models by the names of their deployments."""
        if not self.models:
            return {self.name: self}
        return {
            name: msgspec.structs.replace(model, options={"model_name": name, **model.options})
            for name, model in self.models.items()
        }

    @property
    def cpus_at_most(self) -> float:
        """CPUs that all replicas and gateways reserve, as Ray counts them."""
        replicas = sum(model.cpus * model.most_replicas for model in self.deployments.values())
        return replicas + (0 if self.path is Routing.DIRECT else self.gateways * self.cpus_of_gateway)

    @property
    def cpus_of_gateway(self) -> float:
        """CPUs that a gateway reserves: one, or less if replicas do."""
        return min([1.0, *(model.cpus for model in self.deployments.values())])


def _with_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model, with `option.NAME=VALUE` among its options."""
    named = {name: value for name, value in given.items() if not name.startswith(_OPTION)}
    options = {name: value for name, value in given.items() if name.startswith(_OPTION)}
    return {**named, "options": {**named.get("options", {}), **options}} if options else named
