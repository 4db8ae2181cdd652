"""Plain data to TensorRT-LLM's own objects; the one place that imports its configuration classes."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from djl_trtllm.backends.tensorrt_llm.names import members, module_of, owners


def build_arguments(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of LLM that `data` describes (see `tensorrt_llm_arguments.Arguments`).

    Raises what TensorRT-LLM's classes raise for values they do not take (ValueError, pydantic's ValidationError).
    """
    version = import_module("tensorrt_llm").__version__
    return {name: _object(value, version) for name, value in data.items()}


def _object(value: Any, version: str) -> Any:
    if isinstance(value, list):
        return [_object(item, version) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "enum" in value:
        return getattr(_import(value["enum"], version), value["name"])
    fields = {name: _object(item, version) for name, item in value.items() if name != "class"}
    return _instance(value["class"], fields, version) if "class" in value else fields


def _instance(owner: str, fields: dict[str, Any], version: str) -> Any:
    known = members(owner, version)
    arguments = {name: item for name, item in fields.items() if known[name].kind != "attribute"}
    instance = _import(owner, version)(**arguments)
    # Some classes have no constructor arguments, only attributes: PluginConfig.
    for name in fields.keys() - arguments.keys():
        setattr(instance, name, fields[name])
    return instance


def _import(owner: str, version: str) -> Any:
    found: Any = import_module(module_of(owner, version))
    for name in owners()[owner].symbol.split("."):
        found = getattr(found, name)
    return found
