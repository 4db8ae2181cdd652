"""The parameters `tools`, `tool_choice` and `parallel_tool_calls`."""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.parameters import BOOLEAN, Kind, Parameter

_MOST_TOOLS = 128
_LONGEST_NAME = 256
_MODES = ("none", "auto", "required")


def _read_tools(value: Any) -> list[dict[str, Any]]:
    if type(value) is not list or len(value) > _MOST_TOOLS:
        raise ValueError("")
    for position, tool in enumerate(value):
        function = tool.get("function") if type(tool) is dict and tool.get("type") == "function" else None
        if type(function) is not dict or not _is_name(function.get("name")):
            raise ValueError(f" (number {position} is none)")
        if type(function.get("parameters", {})) is not dict and function["parameters"] is not None:
            raise ValueError(f" (the parameters of {function['name']} are a JSON schema, an object)")
    return value


def _read_choice(value: Any) -> str | dict[str, str]:
    """One of the modes, or `{"name": ...}`."""
    if type(value) is str and value in _MODES:
        return value
    if type(value) is dict and value.get("type") == "function":
        function = value.get("function")
        if type(function) is dict and _is_name(function.get("name")):
            return {"name": function["name"]}
    raise ValueError("")


def _is_name(value: Any) -> bool:
    return type(value) is str and 0 < len(value) <= _LONGEST_NAME


_TOOLS = f'a list of up to {_MOST_TOOLS} of {{"type": "function", "function": {{"name", "description", "parameters"}}}}'
_CHOICE = '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}'


def _function_schema(**members: Any) -> dict[str, Any]:
    name = {"type": "string", "minLength": 1, "maxLength": _LONGEST_NAME}
    function = {"type": "object", "properties": {"name": name, **members}, "required": ["name"]}
    properties = {"type": {"const": "function"}, "function": function}
    return {"type": "object", "properties": properties, "required": ["type", "function"]}


_TOOL_SCHEMA = _function_schema(description={}, parameters={"anyOf": [{"type": "object"}, {"type": "null"}]})
_TOOLS_SCHEMA = {"type": "array", "items": _TOOL_SCHEMA, "maxItems": _MOST_TOOLS}
_CHOICE_SCHEMA = {"anyOf": [{"enum": [*_MODES]}, _function_schema()]}

TOOLS = (
    Parameter(("tools",), Kind(_TOOLS, _read_tools, _TOOLS_SCHEMA), "tools"),
    Parameter(("tool_choice",), Kind(_CHOICE, _read_choice, _CHOICE_SCHEMA), "tool_choice"),
    Parameter(("parallel_tool_calls",), BOOLEAN, "parallel_tool_calls"),
)
"""Rows for the parameter tables."""
