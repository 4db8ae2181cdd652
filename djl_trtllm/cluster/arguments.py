"""The arguments of `djl_trtllm.cluster:build`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from djl_trtllm.errors import ConfigError
from djl_trtllm.model.remote.aws_scaling import Autoscaling

_OPTION = "option."


class ClusterArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a cluster serves, and with how many replicas.

    `model` and `options` are those of `create_app`. The model has the same path on all nodes, or an address.
    """

    model: str | None = None
    options: dict[str, Any] = {}
    name: Annotated[str, Meta(min_length=1)] = "djl-trtllm"
    """Of the deployment."""
    replicas: Annotated[int, Meta(ge=1)] = 1
    autoscale: str | None = None
    """`MIN:MAX[:CONCURRENCY]` as for `djl-trtllm deploy`, instead of a fixed number of replicas."""
    gpus: Annotated[int, Meta(ge=0)] | None = None
    """Of a replica. By default what the options say: tensor parallel degree x pipeline parallel degree."""
    cpus: Annotated[float, Meta(ge=0)] = 1.0
    """Of a replica, as Ray counts them."""
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
            raise ConfigError(
                [f"the arguments of djl_trtllm.cluster:build: {error}; there are {', '.join(cls.__struct_fields__)}"]
            ) from None
        if arguments.autoscale is not None and "replicas" in named:
            raise ConfigError(["the arguments of djl_trtllm.cluster:build have replicas and autoscale: leave one out"])
        return arguments

    @property
    def most_replicas(self) -> int:
        """Replicas at a time."""
        return self.replicas if self.autoscale is None else Autoscaling.parse(self.autoscale, 1).most
