"""The model that a request is for."""

from __future__ import annotations

from djl_trtllm.api import Dialect, ModelStatus
from djl_trtllm.errors import UnknownModelError
from djl_trtllm.service import Registry, ServedModel, State


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
    """The model for a page."""
    ready = model.state is State.READY
    return ModelStatus(model.name, ready, model.model if ready else None, model.statistics)
