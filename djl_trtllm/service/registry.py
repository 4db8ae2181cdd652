"""The models of a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from djl_trtllm.service.served import ServedModel


@dataclass
class Registry:
    """The models of a server, by name.

    `lost` names those that the server was started for and that were unregistered: it is not healthy without them.
    """

    models: dict[str, ServedModel] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)

    def add(self, model: ServedModel) -> None:
        self.models[model.name] = model
        self.lost.discard(model.name)

    def remove(self, model: ServedModel, *, lost: bool = False) -> None:
        """Remove a model; `lost` if the server was started for it and cannot register it again."""
        if self.models.get(model.name) is model:
            del self.models[model.name]
            if lost:
                self.lost.add(model.name)

    def find(self, name: str | None) -> ServedModel | None:
        """The model of that name; without a name, the only one, or else the only one the server was started with.

        So requests without a name, which know of no other model, go on while others are registered, as in DJL Serving.
        """
        if name is not None:
            return self.models.get(name)
        meant = list(self.models.values())
        if len(meant) > 1:
            meant = [model for model in meant if model.at_startup]
        return meant[0] if len(meant) == 1 else None
