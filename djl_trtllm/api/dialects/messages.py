"""Anthropic's Messages as a dialect: `/v1/messages` and `/v1/messages/count_tokens`."""

import secrets
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api import chat, content, parameters as kinds, sampling as shared
from djl_trtllm.api.base import (
    Call,
    ModelContext,
    ModelStatus,
    RawRequest,
    Reply,
    dump_line,
    nearest_row,
    only_model,
    read_json,
)
from djl_trtllm.api.chat import Parsing, as_opaque
from djl_trtllm.api.families import OpenAiLike
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, found, read_object, show
from djl_trtllm.api.parts import Part, PartKind, PartsEncoder
from djl_trtllm.request import FinishReason, SequenceResult

_ERROR_TYPES: dict[type[errors.RequestError], str] = {
    errors.InvalidRequestError: "invalid_request_error",
    errors.UnknownAdapterError: "not_found_error",
    errors.UnknownModelError: "not_found_error",
    errors.UnknownPathError: "not_found_error",
    errors.AuthenticationError: "authentication_error",
    errors.ForbiddenError: "permission_error",
    errors.MethodNotAllowedError: "invalid_request_error",
    errors.RequestTooLargeError: "request_too_large",
    errors.TooManyRequestsError: "rate_limit_error",
    errors.OverloadedError: "overloaded_error",
    errors.NotReadyError: "overloaded_error",
    errors.RequestTimeoutError: "timeout_error",
    errors.GenerationError: "api_error",
}


def _error_body(message: str, error: errors.RequestError | None) -> dict[str, Any]:
    """The JSON of an error."""
    return {"type": "error", "error": {"type": nearest_row(_ERROR_TYPES, error), "message": message}}


_STOP_REASONS = {
    FinishReason.END_TOKEN: "end_turn",
    FinishReason.STOP: "end_turn",  # a stop token id; a stop string has a reason of its own
    FinishReason.LENGTH: "max_tokens",
    FinishReason.CANCELLED: "pause_turn",
    FinishReason.ERROR: "pause_turn",
}

_DELTAS = {
    PartKind.TEXT: b'{"type":"text_delta","text":%b}',
    PartKind.REASONING: b'{"type":"thinking_delta","thinking":%b}',
    PartKind.CALL: b'{"type":"input_json_delta","partial_json":%b}',
}


class MessageEncoder(PartsEncoder):
    """One `message`. With `omits_thinking`, thinking has no text but a signature, from which its text is read again."""

    def __init__(self, code: str, model: str, parsing: Parsing, *, stream: bool, omits_thinking: bool = False) -> None:
        super().__init__(parsing, stream=stream)
        self._id = f"msg_{code}"
        self._model = model
        self._omits_thinking = omits_thinking

    def head(self) -> bytes:
        message = self._message([], None, None, self._usage(0))
        return _event("message_start", {"message": message}) + _event("ping", {})

    def opened(self, part: Part) -> bytes:
        later = {"signature": ""} if part.kind is PartKind.REASONING else {}
        return _event("content_block_start", {"index": part.index, "content_block": self._block(part) | later})

    def more(self, part: Part, text: str, logprobs: list[bytes]) -> bytes:
        if part.kind is PartKind.REASONING and self._omits_thinking:
            return b""
        return self._delta(part, _DELTAS[part.kind] % dump_line(text))

    def closed(self, part: Part) -> bytes:
        signature = b""
        if part.kind is PartKind.REASONING:
            signature = self._delta(part, dump_line({"type": "signature_delta", "signature": self._signature(part)}))
        return signature + _event("content_block_stop", {"index": part.index})

    def end(self, finished: SequenceResult) -> bytes:
        reason, stop = _STOP_REASONS[finished.reason], None
        if finished.reason is FinishReason.STOP and finished.stop_sequence is not None:
            reason, stop = "stop_sequence", finished.stop_sequence
        elif self.calls and finished.reason <= FinishReason.STOP:
            reason = "tool_use"
        usage = self._usage(finished.generated_tokens, finished.cached_tokens)
        if self.stream:
            delta = {"stop_reason": reason, "stop_sequence": stop}
            return _event("message_delta", {"delta": delta, "usage": usage}) + _event("message_stop", {})
        return orjson.dumps(self._message([self._block(part) for part in self.parts], reason, stop, usage))

    def failure(self, error: errors.RequestError) -> bytes:
        return _event("error", _error_body(str(error), error))

    def _message(self, content: list[Any], reason: str | None, stop: str | None, usage: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self, generated: int, reused: int = 0) -> dict[str, Any]:
        """Anthropic's `usage`. Its `input_tokens` are those that the prefix cache did not have."""
        return {
            "input_tokens": self.prompt_tokens - reused,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": reused,
            "output_tokens": generated,
            "output_tokens_details": {"thinking_tokens": self.reasoning_tokens},
        }

    def _block(self, part: Part) -> dict[str, Any]:
        if part.kind is PartKind.CALL:
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _input(part.text)}
        if part.kind is PartKind.REASONING:
            text = "" if self._omits_thinking else part.text
            return {"type": "thinking", "thinking": text, "signature": self._signature(part)}
        return {"type": "text", "text": part.text}

    def _signature(self, part: Part) -> str:
        return as_opaque(part.text) if self._omits_thinking else self._id

    def _delta(self, part: Part, delta: bytes) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b}\n\n' % (
            part.index,
            delta,
        )


def _event(kind: str, members: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_line({"type": kind, **members}))


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call. A text that is not a JSON object, because a limit cut it off, is shown as text."""
    try:
        value = read_json(arguments.encode() or b"{}")
    except (orjson.JSONDecodeError, errors.InvalidRequestError):
        value = None
    return value if type(value) is dict else {"INVALID_JSON": arguments}


# -- fields ------------------------------------------------------------------------------------------------------------

_MODES = {"auto": "auto", "any": "required", "none": "none"}


def _read_choice(value: Any) -> dict[str, Any]:
    """The values of chat's `tool_choice` and `parallel_tool_calls`."""
    kind = value.get("type") if type(value) is dict else None
    one = value.get("disable_parallel_tool_use", False) if kind is not None else False
    if type(one) is not bool:
        raise ValueError(" (disable_parallel_tool_use is true or false)")
    if kind == "tool" and chat.is_name(value.get("name")):
        return {"tool_choice": {"name": value["name"]}, "parallel_tool_calls": not one}
    if type(kind) is not str or kind not in _MODES:
        raise ValueError("")
    return {"tool_choice": _MODES[kind], "parallel_tool_calls": not one}


_THINKS = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}


class _Thinking(NamedTuple):
    """Whether the template is asked for thinking, whether its text is left out, and its most tokens."""

    enabled: bool
    omitted: bool
    budget: int | None


def _read_thinking(value: Any) -> _Thinking:
    kind = value.get("type") if type(value) is dict else None
    if type(kind) is not str or kind not in _THINKS:
        raise ValueError("")
    budget, display = value.get("budget_tokens"), value.get("display")
    if budget is not None and (type(budget) is not int or budget < 1):
        raise ValueError(" (budget_tokens is an integer of at least 1)")
    if display not in (None, "summarized", "omitted"):
        raise ValueError(' (display is "summarized" or "omitted")')
    return _Thinking(_THINKS[kind], display == "omitted", budget)


def _read_format(value: Any) -> Any:
    if type(value) is not dict or value.get("type") != "json_schema":
        raise ValueError("")
    return shared.read_schema(value.get("schema"))


_FORMAT = Parameter(
    ("format",),
    Kind('{"type": "json_schema", "schema": ...}', _read_format, {"type": "object", "required": ["type", "schema"]}),
    "guide",
)
_OF_THE_SERVICE = ("cache_control", "diagnostics", "inference_geo", "service_tier", "speed", "workspace_id")
_OF_THE_CALLER = ("anthropic_beta", "anthropic_version", "metadata", "user_profile_id")
OUTPUT_CONFIG = Table((_FORMAT, Parameter(("effort",), kinds.TEXT, "reasoning_effort")), kinds.ignored("task_budget"))
"""The members of `output_config`."""

_CHOICE = '{"type": "auto", "any" or "none"} or {"type": "tool", "name": ...}'
_THINKING = '{"type": "enabled", "adaptive", "between_tools" or "disabled"}'
_TYPED = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TYPED}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _BLOCKS},
    "required": ["role", "content"],
}
_TOOL = {"type": "object", "properties": {"name": {"type": "string", "minLength": 1}, "input_schema": {}}}


def _listed(items: Any, most: int) -> Kind:
    """The kind of a list of at most `most` items, which the functions below read one by one."""
    return Kind("a list", lambda value: value, {"type": "array", "items": items, "maxItems": most})


_CONVERSATION = (
    Parameter(("model",), kinds.TEXT, IGNORED),
    Parameter(("messages",), _listed(_MESSAGE, content.MOST_MESSAGES), IGNORED),
    Parameter(("system",), Kind("a text", lambda value: value, _BLOCKS), IGNORED),
    Parameter(("tools",), _listed(_TOOL, chat.MOST_TOOLS), IGNORED),
    Parameter(("tool_choice",), Kind(_CHOICE, _read_choice, _TYPED), "choice"),
    Parameter(("thinking",), Kind(_THINKING, _read_thinking, _TYPED), "thinking_config"),
    Parameter(("output_config",), OUTPUT_CONFIG.kind, "output_config"),
    Parameter(("output_format",), _FORMAT.kind, "guide"),
    Parameter(
        ("context_management",),
        # Claude Code sends it, and thinking of earlier turns does stay in the conversation.
        neutral=({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, {"edits": []}, {}),
        advice="send the conversation as it should be read",
    ),
    Parameter(("chat_template_kwargs",), chat.TEMPLATE_KEYWORDS, "chat_template_kwargs"),
    *kinds.ignored(*_OF_THE_SERVICE, *_OF_THE_CALLER),
    Parameter(("container",), advice="no code runs on this server"),
    Parameter(
        ("mcp_servers",), neutral=([],), advice="call MCP servers from the client and send their tools as 'tools'"
    ),
)

FIELDS = Table(
    _CONVERSATION,
    shared.OWN_SAMPLING,
    shared.ADAPTER,
    (
        Parameter(("max_tokens",), kinds.integer(1, shared.MOST_TOKENS), "max_new_tokens"),
        Parameter(("temperature",), kinds.number(0, 2), "temperature"),
        Parameter(("stop_sequences",), kinds.STRINGS_OR_NONE, "stop"),
        Parameter(("stream",), kinds.BOOLEAN, "stream"),
    ),
    required=("messages", "max_tokens"),
)
"""The body of `/v1/messages`."""

COUNT_FIELDS = Table(_CONVERSATION, required=("messages",))
"""The body of `/v1/messages/count_tokens`."""


# -- the conversation --------------------------------------------------------------------------------------------------

_ROLES = ("user", "assistant", "system")
_FILES = ("document", "search_result", "container_upload")


def _as_part(block: Any) -> Any:
    """The content part of chat that a block is."""
    return {"type": "file"} if type(block) is dict and block.get("type") in _FILES else block


def _read_messages(payload: dict[str, Any], problems: Problems) -> list[dict[str, Any]]:
    """`system` and `messages` as chat messages."""
    messages: list[dict[str, Any]] = []
    if payload.get("system") is not None:
        messages.append(
            {"role": "system", "content": content.read_content(payload["system"], "system", problems, _as_part)}
        )
    names: dict[str, str] = {}
    for where, message in content.each_message(payload.get("messages"), problems):
        given = message if isinstance(message, dict) else {}
        role, blocks = given.get("role"), given.get("content")
        blocks = [{"type": "text", "text": blocks}] if isinstance(blocks, str) else blocks
        if role in _ROLES and isinstance(blocks, list):
            messages += _turn(role, blocks, where, names, problems)
            continue
        problems.invalid.append(
            f"'{where}' is {show(message)}: expected 'role' (user, assistant or system) and 'content', a string or a "
            "list of blocks"
        )
    if messages and messages[-1]["role"] == "assistant":
        problems.unsupported.append(
            "the last of 'messages' is of the role assistant, and an answer that was begun (prefill) is not continued "
            "here: end with a message of the user"
        )
    return chat.in_turns(messages)


def _turn(role: str, blocks: list[Any], where: str, names: dict[str, str], problems: Problems) -> list[dict[str, Any]]:
    """The chat messages of one message: results of tools, then the rest. `names` are the functions of calls by id."""
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, block in enumerate(blocks):
        if problems.full:
            break
        place = f"{where}.content[{at}]"
        kind = block.get("type") if type(block) is dict else None
        if kind == "tool_result" and role == "user":
            results.append(_read_result(block, place, names, problems))
        elif kind == "tool_use" and role == "assistant":
            calls += _read_call(block, place, names, problems)
        elif kind == "thinking" and role == "assistant":
            thought = block.get("thinking")
            thoughts.append(thought if type(thought) is str and thought else chat.from_opaque(block.get("signature")))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # another server's
        elif (part := content.read_part(_as_part(block), place, problems)) is not None:
            parts.append(part)
    if results and not parts:
        return results
    message: dict[str, Any] = {"role": role, "content": content.join(parts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(filter(None, thoughts))
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def _read_result(block: dict[str, Any], place: str, names: dict[str, str], problems: Problems) -> dict[str, Any]:
    call, given = block.get("tool_use_id"), block.get("content")
    if type(call) is not str or not call:
        problems.invalid.append(f"'{place}.tool_use_id' {found(call)}: expected the id of a tool_use block")
        return {"role": "tool", "content": ""}
    result = "" if given is None else content.read_content(given, f"{place}.content", problems, _as_part)
    if block.get("is_error") is True:
        error = {"type": "text", "text": "Error:"}
        result = f"Error: {result}" if isinstance(result, str) else [error, *result]
    message = {"role": "tool", "content": result, "tool_call_id": call}
    return message | {"name": names[call]} if call in names else message


def _read_call(block: dict[str, Any], place: str, names: dict[str, str], problems: Problems) -> list[dict[str, Any]]:
    call, name, given = block.get("id"), block.get("name"), block.get("input")
    if type(call) is not str or not call or not chat.is_name(name) or type(given) is not dict:
        problems.invalid.append(f"'{place}' is {show(block)}: expected 'id', 'name' and 'input', an object")
        return []
    names[call] = str(name)
    return [{"id": call, "type": "function", "function": {"name": name, "arguments": orjson.dumps(given).decode()}}]


def _read_tools(raw: Any, problems: Problems) -> list[dict[str, Any]]:
    """The tools in OpenAI's form."""
    if raw is None:
        return []
    if type(raw) is not list or len(raw) > chat.MOST_TOOLS:
        problems.invalid.append(f"'tools' is {show(raw)}: expected a list of up to {chat.MOST_TOOLS} tools")
        return []
    tools = []
    for at, tool in enumerate(raw):
        if type(tool) is dict and tool.get("type") not in (None, "custom"):
            problems.unsupported.append(
                f"'tools[{at}]' is of type {show(tool['type'])}, which only Anthropic's models and servers know: give "
                "a tool with 'name', 'description' and 'input_schema', and run it in the client"
            )
            continue
        tools += chat.function_tool(tool, "input_schema", f"tools[{at}]", problems)
    return tools


def _read_chat(
    table: Table, payload: dict[str, Any], model: ModelContext, problems: Problems
) -> tuple[dict[str, Any], chat.ToolUse | None]:
    """The values of a conversation's fields, with its messages and their images, and its tools."""
    fitted = chat.fit_messages(_read_messages(payload, problems), model, problems)
    values = table.read(payload, problems, "field") | fitted
    config = OUTPUT_CONFIG.read(values.get("output_config", {}), problems, "member of 'output_config'")
    if "guide" in values and "guide" in config:
        problems.invalid.append("'output_format' is given, and 'output_config' has a 'format' too: give the latter")
    values |= config
    values |= values.pop("choice", {})
    if "thinking_config" in values:
        values["enable_thinking"] = values["thinking_config"].enabled
        # Clients send it whatever the model: see also `optional`.
        if values["thinking_config"].budget and chat.thinking_problem(model) is None:
            values["thinking_budget"] = values["thinking_config"].budget
    if tools := _read_tools(payload.get("tools"), problems):
        values["tools"] = tools
    return values, chat.read_tool_use(values, model, problems)


def _lowered(tokens: int, model: ModelContext) -> tuple[tuple[str, str], ...]:
    """The header that says by which limit fewer tokens are generated, whatever the prompt's length."""
    most = model.options.max_output_len
    if tokens <= most:
        return ()
    return (("Warning", f'299 djl-trtllm "max_tokens is {tokens}, at most {most} are generated (max_output_len)"'),)


# -- the dialect -------------------------------------------------------------------------------------------------------

_PATH, _COUNT = "/v1/messages", "/v1/messages/count_tokens"


class Messages(OpenAiLike):
    """Anthropic's Messages, whole (a `message`) and as events, and the count of their tokens.

    Source: the types of Anthropic's Python package 2.14 (`types/message_create_params.py`) and what Claude Code 2.1
    sends. A request becomes a chat in OpenAI's form (`api.chat`): tool results are messages of the role `tool`,
    thinking is `reasoning_content`. It samples unless its temperature is 0, as Anthropic's default temperature is 1.

    Fields that mean nothing to a model of one's own (`metadata`, `service_tier`, `cache_control`, ...) are accepted:
    equal prompt beginnings are reused by themselves, and usage says how much was. Tools that run on Anthropic's
    servers, and fields whose effect an answer would lack, are refused by name.
    """

    title = "Anthropic Messages"
    paths = (_PATH,)
    actions = (_COUNT,)
    tables = MappingProxyType({_PATH: (FIELDS,), _COUNT: (COUNT_FIELDS,)})
    descriptions = read_operations("messages.toml")
    statuses = MappingProxyType({errors.UnknownAdapterError: 404})

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        payload, problems = read_object(request, "messages"), Problems.of(model.options)
        values, tools = _read_chat(FIELDS, payload, model, problems)
        if "max_new_tokens" not in values and not problems.invalid:
            problems.invalid.append("'max_tokens' is missing: expected the largest number of tokens of the answer")
        values.setdefault("do_sample", True)
        sampling = shared.read_sampling(values, problems)
        problems.raise_any()
        # Clients have to send a number, and send what Anthropic's models can do: a bound, not a wish.
        values["default_new_tokens"], sampling = sampling.max_new_tokens, replace(sampling, max_new_tokens=0)
        generation, parsing = chat.chat_request(values, sampling, False, tools, model)
        if (budget := generation.thinking) is not None:
            generation = replace(generation, thinking=replace(budget, optional=True))
        omits = values["thinking_config"].omitted if "thinking_config" in values else False
        stream = values.get("stream", False)
        answer = MessageEncoder(secrets.token_hex(16), model.name, parsing, stream=stream, omits_thinking=omits)
        return Call((generation,), answer, (*problems.headers, *_lowered(generation.default_new_tokens, model)))

    def act(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """Count the tokens of a conversation, in the chat template of the model that the body names."""
        model, render = only_model(models)
        payload, problems = read_object(request, "messages"), Problems.of(model.options)
        values, tools = _read_chat(COUNT_FIELDS, payload, model, problems)
        if values["images"]:
            problems.unsupported.append(
                f"'{values['images'][0].place}' is an image, and its tokens are counted where it is answered: see "
                "'usage' there"
            )
        problems.raise_any()
        chat.set_thinking(values, model)
        if tools is None:
            values.pop("tools", None)
        tokens = chat.token_ids(chat.prompt_text(values, model, render), model, special=False)
        return Reply.json({"input_tokens": len(tokens)})._replace(headers=problems.headers)

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        return _error_body(message, error)


MESSAGES = Messages()
