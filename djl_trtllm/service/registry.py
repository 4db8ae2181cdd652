"""The models of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from djl_trtllm.service.served import ServedModel


@dataclass
class Registry:
    """The models of a server, by name."""

    models: dict[str, ServedModel] = field(default_factory=dict)

    def add(self, model: ServedModel) -> None:
        """Add a model under its name."""
        self.models[model.name] = model

    def remove(self, model: ServedModel) -> None:
        """Remove a model."""
        if self.models.get(model.name) is model:
            del self.models[model.name]

    def find(self, name: str | None) -> ServedModel | None:
        """The model of that name; without a name, the only one."""
        if name is None:
            return next(iter(self.models.values())) if len(self.models) == 1 else None
        return self.models.get(name)
