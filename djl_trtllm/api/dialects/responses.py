"""OpenAI's Responses as a dialect: `/v1/responses`, and stored responses below it.

Source: the types of OpenAI's Python package 3.57 (`types/responses/`) and what Codex 0.171 and the Agents SDK send. A
request becomes a chat (`api.chat`): its items are messages, `instructions` and the role `developer` are the system's.
The answer is a `response`, or its events.

A response is stored unless `store` is false (`api.kept`): `previous_response_id` begins with its conversation, and an
`item_reference` means one of its items. What OpenAI's servers would run (`background`, hosted tools, conversations,
prompt templates) is refused by name. A tool that searches the web or makes images is left out, and a header says so,
because Codex sends one with every request.
"""

import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api import chat, content
from djl_trtllm.api import parameters as kinds
from djl_trtllm.api import sampling as shared
from djl_trtllm.api.base import Call, Dialect, ModelContext, ModelStatus, RawRequest, Reply, dump_line, read_json
from djl_trtllm.api.chat import Parsing, as_opaque
from djl_trtllm.api.choices import error_object, json_list
from djl_trtllm.api.content import MOST_MESSAGES
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
from djl_trtllm.api.parts import Part, PartKind, PartsEncoder
from djl_trtllm.request import FinishReason, SequenceResult


class Stored:
    """The stored responses of one API key. An entry has the response, its own input and output, and its predecessor."""

    def __init__(self, model: ModelContext, key: str) -> None:
        self._kept = model.kept
        self._key = key
        self._seconds = model.options.stored_responses_timeout
        self._left = model.options.max_request_size
        """Bytes that a request may still read: stored items are bounded as those of a body."""

    def response(self, name: str) -> bytes | None:
        entry = self._kept.find(self._key, name, seconds=self._seconds)
        return None if entry is None else entry[0]

    def conversation(self, name: str) -> list[Any]:
        """The items of a response and of all before it. Raises InvalidRequestError."""
        turns: list[bytes] = []
        while name:
            entry = self._kept.find(self._key, name, seconds=self._seconds)
            if entry is None or len(turns) > content.MOST_MESSAGES:
                raise errors.InvalidRequestError(
                    f"the response {show(name)} is not stored: it has expired, was not to be stored, or belongs to "
                    "another API key; send the whole conversation"
                )
            self._take(len(entry[1]) + len(entry[2]))
            turns += [each[1:-1] for each in (entry[2], entry[1]) if len(each) > len(b"[]")]
            name = entry[3].decode()
        items: list[Any] = read_json(b"[%b]" % b",".join(reversed(turns)))
        return items

    def output(self, name: str, at: int) -> Any:
        """An item of a response's output. None if there is none."""
        entry = self._kept.find(self._key, name, seconds=self._seconds)
        if entry is None:
            return None
        self._take(len(entry[2]))
        items = read_json(entry[2])
        return items[at] if at < len(items) else None

    def _take(self, size: int) -> None:
        """Count bytes, before anything is done with them."""
        self._left -= size
        if self._left < 0:
            raise errors.InvalidRequestError(
                "the stored items are more than max_request_size: begin a new conversation with a summary of this one"
            )


def store(
    model: ModelContext,
    key: str,
    name: str,
    own: bytes,
    previous: str,
    response: bytes,
    output: list[dict[str, Any]],
) -> None:
    """Store a response with its own items, a list in JSON."""
    options = model.options
    parts = (response, own, orjson.dumps(output), previous.encode())
    most, seconds = options.stored_responses_memory, options.stored_responses_timeout
    model.kept.keep(key, name, parts, most_bytes=most, seconds=seconds)


_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url", "input_file": "file"}
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_(\d{1,4})")
"""The id of an item that this server made: the response's, and the place in its output."""


class Items:
    """Reads the items of one request. `own` are those that it brings, as they are stored."""

    def __init__(self, stored: Stored, problems: Problems) -> None:
        self.own: list[Any] = []
        self._stored = stored
        self._problems = problems
        self._content = partial(content.read_content, problems=problems, as_part=_as_part)
        self._names: dict[str, str] = {}
        """The functions of calls, by the calls' ids."""

    def read(self, given: Any, previous: str | None, instructions: str | None) -> list[dict[str, Any]]:
        """The chat messages of the conversation."""
        self.own = [{"role": "user", "content": given}] if type(given) is str else given
        if type(self.own) is not list or not self.own:
            self._problems.invalid.append(f"'input' is {show(given)}: expected a text or a list of items")
            return []
        messages = [{"role": "system", "content": instructions}] if instructions else []
        earlier = self._stored.conversation(previous) if previous else []
        if (count := len(earlier) + len(self.own)) > content.MOST_MESSAGES:
            self._problems.invalid.append(f"there are {count} items: expected at most {content.MOST_MESSAGES}")
            return []
        for label, items in (("stored", earlier), ("input", self.own)):
            for at, item in enumerate(items):
                if self._problems.full:
                    break
                messages += self._message(item, f"{label}[{at}]")
        return chat.in_turns(messages)

    def _message(self, item: Any, place: str) -> list[dict[str, Any]]:
        given = item if isinstance(item, dict) else {}
        kind = given.get("type", "message")
        if kind == "item_reference" and type(given.get("id")) is str:
            named = _ITEM_ID.fullmatch(given["id"])
            found = named and self._stored.output(f"resp_{named[1]}", int(named[2]))
            if found:
                return self._message(found, place)
            self._problems.invalid.append(
                f"'{place}' refers to {show(given['id'])}, which is not stored: send the item"
            )
        elif kind == "message" and type(role := given.get("role")) is str and role in _ROLES:
            return [{"role": _ROLES[role], "content": self._content(given.get("content"), f"{place}.content")}]
        elif kind == "reasoning":
            text = _reasoning(given)
            return [{"role": "assistant", "content": "", "reasoning_content": text}] if text else []
        elif kind == "function_call":
            return self._call(given, place)
        elif kind == "function_call_output" and type(given.get("call_id")) is str:
            call = given["call_id"]
            message = {"role": "tool", "content": self._content(given.get("output"), f"{place}.output")}
            function = {"name": self._names[call]} if call in self._names else {}
            return [message | {"tool_call_id": call} | function]
        elif kind == "message" or type(kind) is not str or kind.startswith("function_call"):
            self._problems.invalid.append(
                f"'{place}' is {show(item)}: expected a message with 'role' and 'content', a function_call with "
                "'call_id', 'name' and 'arguments', or a function_call_output with 'call_id' and 'output'"
            )
        else:
            self._problems.unsupported.append(f"'{place}' is of type {show(kind)}, which this server does not take")
        return []

    def _call(self, given: dict[str, Any], place: str) -> list[dict[str, Any]]:
        call, name, arguments = given.get("call_id"), given.get("name"), given.get("arguments")
        if type(call) is not str or not chat.is_name(name) or type(arguments) is not str:
            self._problems.invalid.append(f"'{place}' is {show(given)}: expected 'call_id', 'name' and 'arguments'")
            return []
        shown = shown_name(given.get("namespace"), name)
        self._names[call] = shown
        function = {"name": shown, "arguments": arguments}
        calls = [{"id": call, "type": "function", "function": function}]
        return [{"role": "assistant", "content": "", "tool_calls": calls}]


def _as_part(part: Any) -> Any:
    """The content part of chat that a part of an item is."""
    kind = part.get("type") if type(part) is dict else None
    if kind == "refusal":
        return {"type": "text", "text": part.get("refusal")}
    return part | {"type": _PARTS.get(kind, kind)} if type(kind) is str else part


def shown_name(namespace: Any, name: Any) -> str:
    """The name of a function as the model is shown it."""
    return f"{namespace}.{name}" if type(namespace) is str and namespace else str(name)


def _reasoning(item: dict[str, Any]) -> str:
    """The text of a reasoning item, "" if it has none that can be read here."""
    for member in ("content", "summary"):
        parts = item.get(member)
        texts = [part.get("text") for part in parts if type(part) is dict] if type(parts) is list else []
        if text := "\n".join(text for text in texts if type(text) is str):
            return text
    return chat.from_opaque(item.get("encrypted_content"))


_PREFIXES = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}
_NAMES = {PartKind.TEXT: "output_text", PartKind.REASONING: "reasoning_text", PartKind.CALL: "function_call_arguments"}
_COMPLETED, _INCOMPLETE, _CANCELLED = "completed", "incomplete", "cancelled"
_LAST_EVENTS = {_COMPLETED: "completed", _INCOMPLETE: "incomplete", _CANCELLED: "failed"}
"""The last event of a stream by the response's status: OpenAI has none for "cancelled"."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of a response before its output.

    `code` is what its id and those of its items have in common, `members` are those that do not change. `functions` are
    the namespaces and names of functions by the names that the model is shown. `encodes_reasoning`: clients get the
    reasoning also as a field that they send back. `keep` keeps the finished response and its items.
    """

    code: str
    members: Mapping[str, Any]
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    encodes_reasoning: bool = False
    keep: Callable[[bytes, list[dict[str, Any]]], None] | None = None


class AnswerEncoder(PartsEncoder):
    """One `response`."""

    def __init__(self, answer: Answer, parsing: Parsing, *, stream: bool, logprobs: bool) -> None:
        super().__init__(parsing, stream=stream, logprobs=logprobs)
        self._answer = answer
        self._sent = 0

    def head(self) -> bytes:
        response = self._response("in_progress", [], None)
        return b"".join([self._event(f"response.{kind}", response=response) for kind in ("created", "in_progress")])

    def opened(self, part: Part) -> bytes:
        item = self._item(part, "in_progress")
        content = item["content"].pop() if "content" in item else None
        data = self._event("response.output_item.added", output_index=part.index, item=item)
        return data if content is None else data + self._of_part("response.content_part.added", part, part=content)

    def more(self, part: Part, text: str, logprobs: list[bytes]) -> bytes:
        shown = {"logprobs": json_list(logprobs)} if part.kind is PartKind.TEXT else {}
        return self._of_part(f"response.{_NAMES[part.kind]}.delta", part, delta=text, **shown)

    def closed(self, part: Part) -> bytes:
        item, name = self._item(part, self._status), f"response.{_NAMES[part.kind]}.done"
        if part.kind is PartKind.CALL:
            data = self._of_part(name, part, arguments=part.text, name=item["name"])
        else:
            (content,) = item["content"]
            logprobs = {"logprobs": content["logprobs"]} if part.kind is PartKind.TEXT else {}
            data = self._of_part(name, part, text=part.text, **logprobs)
            data += self._of_part("response.content_part.done", part, part=content)
        return data + self._event("response.output_item.done", output_index=part.index, item=item)

    def end(self, finished: SequenceResult) -> bytes:
        status = _CANCELLED if finished.reason is FinishReason.CANCELLED else self._status
        items = [self._item(part, self._status if part is self.parts[-1] else _COMPLETED) for part in self.parts]
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": finished.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": finished.generated_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + finished.generated_tokens,
        }
        response = self._response(status, items, usage)
        if self._answer.keep is not None:
            self._answer.keep(orjson.dumps(response), items)
        if not self.stream:
            return orjson.dumps(response)
        return self._event(f"response.{_LAST_EVENTS[status]}", response=response)

    def failure(self, error: errors.RequestError) -> bytes:
        shown = error_object(str(error), error)
        response = self._response("failed", [self._item(part, _INCOMPLETE) for part in self.parts], None)
        response["error"] = {"code": shown["code"] or "server_error", "message": shown["message"]}
        return self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        """The status of the last item: a limit or the end of its request may have cut it off."""
        cut = self.finished is not None and self.finished.reason > FinishReason.STOP
        return _INCOMPLETE if cut else _COMPLETED

    def _response(self, status: str, items: list[dict[str, Any]], usage: dict[str, Any] | None) -> dict[str, Any]:
        details = {"reason": "max_output_tokens"} if status == _INCOMPLETE else None
        head = {"id": f"resp_{self._answer.code}", "object": "response", "status": status, "error": None}
        return {**head, "incomplete_details": details, **self._answer.members, "output": items, "usage": usage}

    def _item(self, part: Part, status: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._id(part), "status": status}
        if part.kind is PartKind.CALL:
            namespace, name = self._answer.functions.get(part.name, ("", part.name))
            call = {"type": "function_call", "call_id": part.call_id, "name": name, "arguments": part.text}
            return item | call | ({"namespace": namespace} if namespace else {})
        content: dict[str, Any] = {"type": _NAMES[part.kind], "text": part.text}
        if part.kind is PartKind.REASONING:
            encoded = {"encrypted_content": as_opaque(part.text)} if self._answer.encodes_reasoning else {}
            return item | {"type": "reasoning", "summary": [], "content": [content]} | encoded
        content |= {"annotations": [], "logprobs": json_list(part.logprobs)}
        return item | {"type": "message", "role": "assistant", "content": [content]}

    def _id(self, part: Part) -> str:
        return f"{_PREFIXES[part.kind]}_{self._answer.code}_{part.index}"

    def _of_part(self, kind: str, of: Part, **members: Any) -> bytes:
        place = {} if of.kind is PartKind.CALL else {"content_index": 0}
        return self._event(kind, item_id=self._id(of), output_index=of.index, **place, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        event = {"type": kind, "sequence_number": self._sent, **members}
        self._sent += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), dump_line(event))


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
    members["background"] = False  # a request may say 0
    return members | {"created_at": int(time.time()), "model": model.name, "service_tier": "default", "store": stores}


RESPONSES = Responses()
