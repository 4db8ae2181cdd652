"""The state that HTTP, WebSockets and gRPC share: models, access, clients, counts, reports, memory of bodies."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from djl_trtllm.api.base import Dialect, ModelStatus
from djl_trtllm.api.front_end import request_id
from djl_trtllm.config import Options
from djl_trtllm.errors import OverloadedError, UnknownModelError
from djl_trtllm.server.access import EVERYBODY, Access, read_access
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.service.clients import Clients
from djl_trtllm.service.lifecycle import Registry, ServedModel, State
from djl_trtllm.telemetry import Telemetry


class BodyMemory:
    """Counts the bytes of request bodies that are in memory.

    A body may have as much as is still free after it (dynamic thresholds, as switches share buffers: Choudhury and
    Hahne, 1998). Large bodies leave room for small ones, however many they are, and nothing is reserved for bodies that
    do not come.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit
        self.used = 0

    def take(self, held: int, more: int) -> bool:
        """Take `more` bytes for a body that holds `held` of them; False if it would have too many."""
        if held + more > self.limit - self.used - more:
            return False
        self.used += more
        return True

    def release(self, size: int) -> None:
        self.used -= size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """Count a body of `size` bytes as in memory during the block. Raises OverloadedError."""
        if not self.take(0, size):
            raise self.refusal()
        try:
            yield
        finally:
            self.release(size)

    def refusal(self) -> OverloadedError:
        """Return the error for a body for which too little memory is left."""
        return OverloadedError(
            f"the bodies of all requests that are being read have {self.used} of max_body_memory={self.limit} "
            "bytes, which leaves too little for this one",
            queue_depth=self.used,
            capacity=self.limit,
            retry_after=1,
        )


def find_model(registry: Registry, dialect: Dialect, name: str | None, endpoint: str | None = None) -> ServedModel:
    """The model of that name; without a name, or by an alias, the only one. Raises UnknownModelError."""
    model = registry.find(name)
    if model is None and (name is None or name in dialect.aliases):
        # SageMaker's client names the endpoint, which may also be the name of a model.
        model = registry.find(endpoint) or registry.find(None)
    if model is not None:
        return model
    known = ", ".join(sorted(registry.models)) or "none"
    name = name or endpoint
    if name is None:
        raise UnknownModelError(f"Parameter model_name is required; loaded: {known}", name=None)
    raise UnknownModelError(f"there is no model named {name!r} here; loaded: {known}", name=name)


def status_of(model: ServedModel) -> ModelStatus:
    """Return the model's status as dialects' pages show it."""
    ready = model.state is State.READY
    refusals = model.workers[0].refusals
    return ModelStatus(model.name, ready, model.model if ready else None, model.statistics, refusals=refusals)


@dataclass
class ServerContext:
    """The models of a server, its options, and what HTTP, WebSockets and gRPC check, count and report together.

    `unchangeable` says why the management API changes nothing, on a server where it does not. Raises ConfigError if the
    options of clients are wrong.
    """

    options: Options
    registry: Registry = field(default_factory=Registry)
    access: Access = EVERYBODY
    telemetry: Telemetry = field(default_factory=Telemetry)
    counts: ServerCounts = field(default_factory=ServerCounts)
    unchangeable: str = ""

    def __post_init__(self) -> None:
        self.bodies = BodyMemory(self.options.max_body_memory)
        self.clients = Clients(self.options)
        self.id_header = self.options.request_id_header_key.lower().encode("latin-1")
        """The name of the response header with the request's id."""

    @classmethod
    def open(cls, options: Options) -> "ServerContext":
        """Return the context of a server with these options and no models. Raises ConfigError."""
        access = read_access(options)
        return cls(options, access=access, telemetry=Telemetry.open(options, shown=access.without_keys))

    def request_id(self, properties: Mapping[str, str]) -> str:
        """The id of a request with these headers; not one with an API key in it, as the log has the id in each line."""
        return request_id(properties, self.options.request_id_header_key, self.access.without_keys)
