"""DJL's calls about LoRA adapters, in both modes."""

from __future__ import annotations

from typing import Any

from djl_trtllm.djl.item import Item
from djl_trtllm.errors import InvalidRequestError, RequestError
from djl_trtllm.service import ModelService

_FAILED = 424


def register(service: ModelService, inputs: Any) -> Item:
    """Add the adapter `name` from the model's own folder; `src` is its place there, or its whole path."""
    name = inputs.get_property("name") or ""
    try:
        if not service.serves_adapters:
            raise InvalidRequestError("LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM")
        service.adapters.register(name, inputs.get_property("src") or name)
    except RequestError as error:
        return Item(b"", True, _FAILED, str(error))
    return Item(f"Adapter {name} registered".encode(), True)


def update(service: ModelService, inputs: Any) -> Item:
    """Refused: other weights under an old name would be another adapter to the engine."""
    return Item(b"", True, _FAILED, "an adapter cannot be changed: unregister it, then register it again")


def unregister(service: ModelService, inputs: Any) -> Item:
    """Take the adapter `name` away."""
    name = inputs.get_property("name") or ""
    try:
        service.adapters.unregister(name)
    except RequestError as error:
        return Item(b"", True, _FAILED, str(error))
    return Item(f"Adapter {name} unregistered".encode(), True)
