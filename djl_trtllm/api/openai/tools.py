"""What a request's tools mean: for the chat template, for the engine, and for the parser of the output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from djl_trtllm.api.base import ModelContext
from djl_trtllm.api.guides import read_schema
from djl_trtllm.api.output_parsers import NamedParser, OutputParser, RequiredParser, ToolFormat, tool_format
from djl_trtllm.api.parameters import Problems, show
from djl_trtllm.config import ToolCallFormat
from djl_trtllm.request import Guide

_OTHER_FORMAT = ToolFormat(lambda names: RequiredParser())
"""Of a model whose own format is not known: only its ids are used."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request whose model may call them.

    `parser` makes one for each sequence, None if calls stay in the text. `shown_tokens` are the markers it looks for.
    `guide` constrains the output to calls. `parallel`: more than one call is returned.
    """

    parser: Callable[[], OutputParser] | None
    format: ToolFormat
    shown_tokens: tuple[str, ...] = ()
    guide: Guide | None = None
    parallel: bool = True


def read_tool_use(values: dict[str, Any], model: ModelContext, problems: Problems) -> ToolUse | None:
    """What to do about `tools` and `tool_choice`. None if the model is not shown any."""
    tools: list[dict[str, Any]] = values.get("tools", [])
    choice = values.get("tool_choice", "auto")
    forced = choice not in ("none", "auto")
    if forced and not tools:
        problems.invalid.append(f"'tool_choice' is {show(choice)} and there are no 'tools': give at least one")
    if choice == "none" or not tools:
        return None
    source, setting = model.tokenizer.chat_source(True), model.options.tool_call_parser
    if "tools" not in source:
        problems.unsupported.append("'tools' is given, and the model's chat template has no place for tools")
        return None
    own = tool_format(setting, source)
    parallel = values.get("parallel_tool_calls", True)
    if forced:
        guide = _guide(choice, tools, parallel, values, problems)
        parser = RequiredParser if choice == "required" else functools.partial(NamedParser, choice["name"])
        return ToolUse(parser, own or _OTHER_FORMAT, (), guide, parallel)
    if own is None:
        problems.unsupported.append(
            "'tools' is given, and the model's chat template does not show how the model writes tool calls: set "
            "option.tool_call_parser to hermes, llama3_json or mistral, or to none to get them as text"
        )
        return None
    names = frozenset(tool["function"]["name"] for tool in tools)
    own_parser = None if setting is ToolCallFormat.NONE else functools.partial(own.parser, names)
    return ToolUse(own_parser, own, own.markers, None, parallel)


def fit_messages(messages: list[dict[str, Any]], model: ModelContext, problems: Problems) -> list[dict[str, Any]]:
    """The messages with the ids of tool calls as the model's chat template takes them. Rendering does the same with
    their arguments (`ChatTemplate.render`)."""
    if not any("tool_calls" in message or "tool_call_id" in message for message in messages):
        return messages
    own = tool_format(model.options.tool_call_parser, model.tokenizer.chat_source(True)) or _OTHER_FORMAT
    return [_fit(message, f"messages[{at}]", own, problems) for at, message in enumerate(messages)]


def _fit(message: dict[str, Any], where: str, own: ToolFormat, problems: Problems) -> dict[str, Any]:
    message = dict(message)
    if type(message.get("tool_call_id")) is str:
        message["tool_call_id"] = own.fit_id(message["tool_call_id"])
    calls = message.pop("tool_calls", None)
    if not calls:
        return message  # templates ask whether the key is there
    fitted: list[dict[str, Any]] = []
    for position, call in enumerate(calls if type(calls) is list else [calls]):
        function = call.get("function") if type(call) is dict else None
        arguments = function.get("arguments") if type(function) is dict else None
        if type(function) is not dict or type(function.get("name")) is not str or type(arguments) not in _ARGUMENTS:
            problems.invalid.append(
                f"'{where}.tool_calls[{position}]' is {show(call)}: expected "
                '{"id", "type": "function", "function": {"name", "arguments": JSON as text}}'
            )
            continue
        fitted.append(dict(call))
        if type(call.get("id")) is str:
            fitted[-1]["id"] = own.fit_id(call["id"])
    if message.get("content") is None:
        message["content"] = ""  # templates look into it
    return message | {"tool_calls": fitted}


_ARGUMENTS = (str, dict, type(None))


def _guide(
    choice: Any, tools: list[dict[str, Any]], parallel: bool, values: dict[str, Any], problems: Problems
) -> Guide | None:
    """What a forced call has to look like: a list of calls, or the arguments of the one function."""
    if values.get("guide") is not None:
        problems.invalid.append(
            f"'tool_choice' is {show(choice)}, and another parameter constrains the output too: give one of them"
        )
    functions = {tool["function"]["name"]: tool["function"] for tool in tools}
    if choice != "required" and choice["name"] not in functions:
        problems.invalid.append(
            f"'tool_choice' is {show(choice['name'])}: expected one of the tools, {show(sorted(functions))}"
        )
        return None
    try:
        schema = _list_schema(functions, parallel) if choice == "required" else _parameters(functions[choice["name"]])
        return read_schema(schema)
    except (ValueError, TypeError, RecursionError) as error:  # the latter two: nested too deeply
        problems.invalid.append(f"'tools' cannot be turned into one JSON schema{error}")
        return None


def _list_schema(functions: dict[str, dict[str, Any]], parallel: bool) -> dict[str, Any]:
    definitions: dict[str, dict[str, Any]] = {}
    items: list[dict[str, Any]] = []
    for name, function in functions.items():
        parameters = dict(_parameters(function))
        for keyword in ("$defs", "definitions"):
            # References are to the root of the schema.
            own = parameters.pop(keyword, {})
            if type(own) is not dict:
                raise ValueError(f" ({keyword} of {show(name)} is no object)")
            for key, value in own.items():
                if definitions.setdefault(keyword, {}).setdefault(key, value) != value:
                    raise ValueError(f" ({show(key)} in {keyword} differs between functions)")
        properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
        items.append({"type": "object", "properties": properties, "required": ["name", "parameters"]})
    most = {} if parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": items}, **definitions}


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or {"type": "object", "properties": {}}
