"""OpenAI's Responses as a dialect: `/v1/responses`, and stored responses below it.

Source: the types of OpenAI's Python package 3.57 (`types/responses/`) and what Codex 0.171 and the Agents SDK send. A
request becomes a chat (`api.chat`): its items are messages, `instructions` and the role `developer` are the system's.

A response is stored unless `store` is false (`api.kept`): `previous_response_id` begins with its conversation, and an
`item_reference` means one of its items. What OpenAI's servers would run (`background`, hosted tools, conversations,
prompt templates) is refused by name. A tool that searches the web or makes images is left out, and a header says so,
because Codex sends one with every request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api import chat
from djl_trtllm.api import parameters as kinds
from djl_trtllm.api import sampling as shared
from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, RawRequest, Reply
from djl_trtllm.api.choices import error_object
from djl_trtllm.api.content import MOST_MESSAGES
from djl_trtllm.api.conversations import Stored, store
from djl_trtllm.api.dialects.responses.encoder import Answer, AnswerEncoder
from djl_trtllm.api.dialects.responses.items import Items, shown_name
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import (
    IGNORED,
    Kind,
    Parameter,
    Problems,
    Table,
    in_header,
    read_model_name,
    read_object,
    show,
)

_LOGPROBS, _ENCODED = "message.output_text.logprobs", "reasoning.encrypted_content"
"""What `include` may name. Other names belong to hosted tools, so what they ask for is never there."""


def _read_choice(value: Any) -> Any:
    """Chat's `tool_choice`, or `{"mode", "names"}` of allowed tools."""
    if type(value) is str:
        return chat.read_choice(value)
    kind = value.get("type") if type(value) is dict else None
    if kind == "function" and chat.is_name(value.get("name")):
        return {"name": shown_name(value.get("namespace"), value["name"])}
    tools = value.get("tools") if kind == "allowed_tools" else None
    if type(tools) is list and len(tools) <= chat.MOST_TOOLS and value.get("mode") in ("auto", "required"):
        names = [shown_name(tool.get("namespace"), tool.get("name")) for tool in tools if _is_function(tool)]
        return {"mode": value["mode"], "names": names}
    raise ValueError("")


def _is_function(tool: Any) -> bool:
    return type(tool) is dict and tool.get("type") == "function"


_TYPED = {"type": "object", "properties": {"type": {"type": "string"}}}
_FORMAT = '{"type": "text", "json_object" or "json_schema"}, the last with "name" and "schema"'
TEXT = Table(
    (
        Parameter(("format",), Kind(_FORMAT, shared.read_response_format, _TYPED), "guide"),
        Parameter(("verbosity",), target=IGNORED),
    )
)
REASONING = Table(
    (
        Parameter(("effort",), kinds.TEXT, "reasoning_effort"),
        *(Parameter((name,), target=IGNORED) for name in ("context", "generate_summary", "mode", "summary")),
    )
)
"""The members of `text` and `reasoning`."""

_ITEMS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TYPED, "maxItems": MOST_MESSAGES}]}
_CHOICE = '"none", "auto", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", "mode", "tools"}'
_NO_MEANING = ("access_programs", "background_options", "client_metadata", "image", "max_tool_calls", "service_tier")
_OF_CALLERS = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user")

FIELDS = Table(
    shared.OWN_SAMPLING,
    shared.ADAPTER,
    (
        Parameter(("model",), kinds.TEXT, IGNORED),
        Parameter(("input",), Kind("a text or a list of items", lambda value: value, _ITEMS), IGNORED),
        Parameter(("instructions",), kinds.TEXT, "instructions"),
        Parameter(("max_output_tokens",), kinds.integer(1, shared.MOST_TOKENS), "max_new_tokens"),
        Parameter(("temperature",), kinds.number(0, 2), "temperature"),
        Parameter(("top_logprobs",), kinds.integer(0, 20), "top_logprobs"),
        Parameter(("stream",), kinds.BOOLEAN, "stream"),
        Parameter(("stream_options",), kinds.OBJECT, IGNORED),
        Parameter(("store",), kinds.BOOLEAN, "store"),
        Parameter(("previous_response_id",), kinds.TEXT, "previous"),
        Parameter(("tools",), Kind("a list of tools", list, {"type": "array", "items": _TYPED}), IGNORED),
        Parameter(("tool_choice",), Kind(_CHOICE, _read_choice), "tool_choice"),
        Parameter(("parallel_tool_calls",), kinds.BOOLEAN, "parallel_tool_calls"),
        Parameter(("text",), TEXT.kind, "text"),
        Parameter(("reasoning",), REASONING.kind, "reasoning"),
        Parameter(("include",), kinds.STRINGS_OR_NONE, "include"),
        Parameter(("metadata",), kinds.OBJECT, "metadata"),
        Parameter(("chat_template_kwargs",), chat.TEMPLATE_KEYWORDS, "chat_template_kwargs"),
        *(Parameter((name,), target=IGNORED) for name in (*_NO_MEANING, *_OF_CALLERS)),
        Parameter(("background",), neutral=(False,), advice="a response is made while its client waits: use 'stream'"),
        Parameter(("context_management",), neutral=([],), advice="send the conversation as it should be read"),
        Parameter(("conversation",), advice="use 'previous_response_id'"),
        Parameter(("moderation",), advice="nothing is moderated here"),
        Parameter(("prompt",), advice="send the text of the prompt as 'instructions' and 'input'"),
        Parameter(("truncation",), neutral=("disabled",), advice="leave items out of 'input'"),
    ),
    elsewhere={"messages": "to /v1/chat/completions, here it is 'input'", "max_tokens": "here as 'max_output_tokens'"},
    required=("input",),
)
"""The body of `/v1/responses`."""

_LEFT_OUT = ("web_search", "image_generation")


class _Tools:
    """The tools of a request in chat's form, with the namespaces and names of their functions by what models see."""

    def __init__(self, raw: Any, problems: Problems) -> None:
        self.tools: list[dict[str, Any]] = []
        self.functions: dict[str, tuple[str, str]] = {}
        self.headers: tuple[tuple[str, str], ...] = ()
        self._left_out: list[str] = []
        self._problems = problems
        self._add_all(raw, "tools", "")
        if self._left_out:
            shown = ", ".join(map(in_header, self._left_out[:10]))
            text = f'299 djl-trtllm "left out, because this server does not run them: {shown}"'
            self.headers = (("Warning", text),)

    def _add_all(self, tools: Any, place: str, namespace: str) -> None:
        if type(tools) is not list or len(tools) > chat.MOST_TOOLS or len(self.tools) > chat.MOST_TOOLS:
            self._problems.invalid.append(
                f"'{place}' is {show(tools)}: expected a list of tools, with up to {chat.MOST_TOOLS} functions in all"
            )
            return
        for at, tool in enumerate(tools):
            if not self._problems.full:
                self._add(tool, f"{place}[{at}]", namespace)

    def _add(self, tool: Any, place: str, namespace: str) -> None:
        kind, name = (tool.get("type"), tool.get("name")) if type(tool) is dict else (None, None)
        if kind == "function":
            shown = shown_name(namespace, name)
            self.tools += chat.function_tool(tool, "parameters", place, self._problems, shown)
            self.functions[shown] = (namespace, str(name))
        elif kind == "namespace" and not namespace and chat.is_name(name):
            self._add_all(tool.get("tools"), f"{place}.tools", str(name))
        elif type(kind) is str and kind.startswith(_LEFT_OUT):
            self._left_out.append(f"{place} ({kind[:80]})")
        else:
            self._problems.unsupported.append(
                f"'{place}' is {show(tool)}, and only functions are run, by the client: give "
                '{"type": "function", "name", "description", "parameters"}'
            )


_PATH, _STORED = "/v1/responses", "/v1/responses/{response}"


class Responses(Dialect):
    """OpenAI's Responses, whole and as events, and stored ones."""

    paths = (_PATH,)
    pages = (_STORED,)
    removals = (_STORED,)
    tables = MappingProxyType({_PATH: (FIELDS,)})
    descriptions = read_operations("responses.toml")
    names_model = True
    statuses = MappingProxyType({errors.UnknownAdapterError: 404})

    def model_name(self, request: RawRequest) -> str | None:
        """The model that the body names; None for "" and for none."""
        return read_model_name(request)

    def size(self, request: RawRequest, model: ModelContext) -> int:
        """Stored responses are read too."""
        return len(request.body) + model.kept.size_of(request.key)

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        payload, problems = read_object(request, "input"), Problems.of(model.options)
        values = FIELDS.read(payload, problems, "field")
        values |= TEXT.read(values.get("text", {}), problems, "member of 'text'")
        values |= REASONING.read(values.get("reasoning", {}), problems, "member of 'reasoning'")
        items = Items(Stored(model, request.key), problems)
        messages = items.read(payload.get("input"), values.get("previous"), values.get("instructions"))
        messages, images = chat.fit_messages(messages, model, problems)
        declared = _Tools(payload.get("tools") or [], problems)
        values["tools"], choice = declared.tools, values.get("tool_choice")
        if isinstance(choice, dict) and "mode" in choice:
            values["tool_choice"], allowed = choice["mode"], choice["names"]
            values["tools"] = [tool for tool in declared.tools if tool["function"]["name"] in allowed]
            if unknown := [name for name in allowed if name not in declared.functions]:
                problems.invalid.append(f"'tool_choice' allows {show(unknown)}: expected names of functions in 'tools'")
        tools = chat.read_tool_use(values, model, problems)
        included = values.get("include", ())
        logprobs = values["logprobs"] = _LOGPROBS in included
        if values.get("top_logprobs") and not logprobs:
            problems.invalid.append(f"'top_logprobs' is given: expected 'include' to have \"{_LOGPROBS}\"")
        values.setdefault("do_sample", True)
        sampling = shared.read_sampling(values, problems)
        problems.raise_any()
        generation, parsing = chat.chat_request(values, sampling, logprobs, messages, tools, model, images)
        if generation.guide is not None and generation.guide_from is None:
            generation = replace(generation, guide_from="text")
        code = secrets.token_hex(16)
        stores = values.get("store", True) and model.options.stored_responses_memory > 0
        answer = Answer(
            code,
            _members(payload, model, stores=stores),
            declared.functions,
            encodes_reasoning=_ENCODED in included,
            keep=partial(store, model, request.key, f"resp_{code}", orjson.dumps(items.own), values.get("previous", ""))
            if stores
            else None,
        )
        stream = values.get("stream", False)
        encoder = AnswerEncoder(answer, parsing, stream=stream, logprobs=logprobs)
        return Call((generation,), encoder, (*problems.headers, *declared.headers))

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """A stored response."""
        name = request.parameters["response"]
        for model in models:
            if model.context is not None and (found := Stored(model.context, request.key).response(name)) is not None:
                return Reply(200, "application/json", found)
        return _unknown(name)

    def remove(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """Remove a stored response; those that follow it have lost their beginning."""
        name = request.parameters["response"]
        if any(model.context is not None and model.context.kept.remove(request.key, name) for model in models):
            return Reply.json({"id": name, "object": "response", "deleted": True})
        return _unknown(name)

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        return {"error": error_object(message, error)}


def _unknown(name: str) -> Reply:
    text = f"there is no stored response {show(name)}: it has expired, was not stored, or belongs to another API key"
    return Reply.json({"error": error_object(text, None) | {"type": "invalid_request_error", "code": "not_found"}}, 404)


def _members(payload: dict[str, Any], model: ModelContext, *, stores: bool) -> dict[str, Any]:
    """The members of a response that repeat its request."""
    repeated = ("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key")
    defaults = {
        "background": False,
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
    }
    given = {name: value for name, value in payload.items() if value is not None}
    members = {name: given.get(name) for name in (*repeated, "safety_identifier", "user")}
    members |= {name: given.get(name, value) for name, value in defaults.items()}
    return members | {"created_at": int(time.time()), "model": model.name, "service_tier": "default", "store": stores}


RESPONSES = Responses()
