"""DJL's calls for LoRA adapters, in both modes."""

from __future__ import annotations

from typing import Any

from djl_trtllm.djl.item import Item
from djl_trtllm.errors import InvalidRequestError, RequestError
from djl_trtllm.service import ModelService

_FAILED = 424


def register(service: ModelService, inputs: Any) -> Item:
    """Register the adapter `name` from the model's own folder; `src` is its path there, or its absolute path."""
    name = inputs.get_property("name") or ""
    try:
        if not service.serves_adapters:
            raise InvalidRequestError("LoRA is not enabled: set option.enable_lora=true, on TensorRT-LLM")
        service.adapters.register(name, inputs.get_property("src") or name)
    except RequestError as error:
        return Item(b"", True, _FAILED, str(error))
    return Item(f"Adapter {name} registered".encode(), True)


def update(service: ModelService, inputs: Any) -> Item:
    """Refuse: the engine keeps adapters by id, so changed weights need a new registration."""
    return Item(b"", True, _FAILED, "an adapter cannot be changed: unregister it, then register it again")


def unregister(service: ModelService, inputs: Any) -> Item:
    name = inputs.get_property("name") or ""
    try:
        service.adapters.unregister(name)
    except RequestError as error:
        return Item(b"", True, _FAILED, str(error))
    return Item(f"Adapter {name} unregistered".encode(), True)
