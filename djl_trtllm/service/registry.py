"""The models of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from djl_trtllm.service.lifecycle import ModelService


@dataclass
class Registry:
    """The models of a server, by name."""

    services: dict[str, ModelService] = field(default_factory=dict)

    def add(self, service: ModelService) -> None:
        """Register a model under its name."""
        self.services[service.name] = service

    def find(self, name: str | None) -> ModelService | None:
        """The model of that name; without a name, the only one there is."""
        if name is None:
            return next(iter(self.services.values())) if len(self.services) == 1 else None
        return self.services.get(name)
