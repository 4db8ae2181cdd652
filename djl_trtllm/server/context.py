"""What all ways into a server share."""

from __future__ import annotations

from dataclasses import dataclass, field

from djl_trtllm.config import Options
from djl_trtllm.server.access import EVERYBODY, Access, read_access
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.service import Registry
from djl_trtllm.service.clients import Clients
from djl_trtllm.telemetry import Telemetry


@dataclass
class ServerContext:
    """The models of a server, its options, and what HTTP, WebSockets and gRPC check, count and report together.

    Raises ConfigError if the options of clients are wrong.
    """

    options: Options
    registry: Registry = field(default_factory=Registry)
    access: Access = EVERYBODY
    telemetry: Telemetry = field(default_factory=Telemetry)
    counts: ServerCounts = field(default_factory=ServerCounts)

    def __post_init__(self) -> None:
        self.bodies = BodyMemory(self.options.max_body_memory)
        self.clients = Clients(self.options)

    @classmethod
    def open(cls, options: Options) -> ServerContext:
        """That of a server with these options, without models. Raises ConfigError, also for access and traces."""
        return cls(options, access=read_access(options), telemetry=Telemetry.open(options))
