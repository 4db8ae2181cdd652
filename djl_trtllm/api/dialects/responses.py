"""OpenAI's Responses as a dialect: `/v1/responses`, and stored responses below it."""

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
from djl_trtllm.api import chat, content, parameters as kinds, sampling as shared
from djl_trtllm.api.base import Call, ModelContext, ModelStatus, RawRequest, Reply, dump_line, read_json
from djl_trtllm.api.chat import Parsing, as_opaque
from djl_trtllm.api.families import OpenAiLike, error_object
from djl_trtllm.api.openapi import read_operations
from djl_trtllm.api.parameters import IGNORED, Kind, Parameter, Problems, Table, found, read_object, show
from djl_trtllm.api.parts import Part, PartKind, PartsEncoder, json_list
from djl_trtllm.request import FinishReason, SequenceResult


class Stored:
    """The stored responses of one API key. A request may read as many bytes of them as its body may have.

    An entry has the response, its own input and output as lists in JSON, and the id of its predecessor.
    """

    def __init__(self, model: ModelContext, key: str) -> None:
        self._kept, self._key, self._left = model.kept, key, model.options.max_request_size

    def keep(self, name: str, own: bytes, previous: str, response: bytes, output: list[dict[str, Any]]) -> None:
        self._kept.keep(self._key, name, (response, own, orjson.dumps(output), previous.encode()))

    def conversation(self, name: str) -> list[Any]:
        """The items of a response and of all before it. Raises InvalidRequestError."""
        turns: list[bytes] = []
        while name:
            entry = self._kept.find(self._key, name)
            if entry is None or len(turns) > content.MOST_MESSAGES:
                raise errors.InvalidRequestError(
                    f"the response {show(name)} is not stored: it has expired, was not to be stored, or belongs to "
                    "another API key; send the whole conversation"
                )
            _, own, output, previous = entry
            self._take(len(own) + len(output))
            turns += [each[1:-1] for each in (output, own) if len(each) > len(b"[]")]
            name = previous.decode()
        items: list[Any] = read_json(b"[%b]" % b",".join(reversed(turns)))
        return items

    def output(self, name: str, at: int) -> Any:
        """Item number `at` of a stored response's output, None if there is no such item."""
        if (entry := self._kept.find(self._key, name)) is None:
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


_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = {"input_text": "text", "output_text": "text", "input_image": "image_url", "input_file": "file"}
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_(\d{1,4})")
"""The id of an item that this server made: the response's, and the place in its output."""


class Items:
    """Reads the items of one request. `own` are those that the request itself brings, as they are stored."""

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
            self._problems.invalid.append(f"'input' {found(given)}: expected a text or a list of items")
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
        given = {"type": "message"} | item if isinstance(item, dict) else {}
        match given:
            case {"type": "item_reference", "id": str(name)}:
                named = _ITEM_ID.fullmatch(name)
                if named and (found := self._stored.output(f"resp_{named[1]}", int(named[2]))):
                    return self._message(found, place)
                problem = f"'{place}' refers to {show(name)}, which is not stored: send the item"
            case {"type": "message", "role": str(role)} if role in _ROLES:
                return [{"role": _ROLES[role], "content": self._content(given.get("content"), f"{place}.content")}]
            case {"type": "reasoning"}:
                text = _reasoning(given)
                return [{"role": "assistant", "content": "", "reasoning_content": text}] if text else []
            case {"type": "function_call", "call_id": str(call), "arguments": str()} if chat.is_name(given.get("name")):
                self._names[call] = shown_name(given.get("namespace"), given["name"])
                function = {"name": self._names[call], "arguments": given["arguments"]}
                calls = [{"id": call, "type": "function", "function": function}]
                return [{"role": "assistant", "content": "", "tool_calls": calls}]
            case {"type": "function_call_output", "call_id": str(call)}:
                output = self._content(given.get("output"), f"{place}.output")
                named_as = {"name": self._names[call]} if call in self._names else {}
                return [{"role": "tool", "content": output, "tool_call_id": call, **named_as}]
            case {"type": str(kind)} if not kind.startswith(("message", "function_call")):
                unknown = f"'{place}' is of type {show(kind)}, which this server does not take: leave it out"
                self._problems.unsupported.append(unknown)
                return []
            case _:
                problem = (
                    f"'{place}' is {show(item)}: expected a message with 'role' and 'content', a function_call with "
                    "'call_id', 'name' and 'arguments', or a function_call_output with 'call_id' and 'output'"
                )
        self._problems.invalid.append(problem)
        return []


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
    """The part of a response that is known before its output.

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
"""The names in `include` that have an effect. Other names ask for results of hosted tools, which no response has."""


def _read_choice(value: Any) -> Any:
    """Chat's `tool_choice`, or `{"mode", "names"}` of allowed tools."""
    match value:
        case str():
            return chat.read_choice(value)
        case {"type": "function", "name": str(name)} if chat.is_name(name):
            return {"name": shown_name(value.get("namespace"), name)}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            if len(tools) <= chat.MOST_TOOLS:
                functions = [tool for tool in tools if type(tool) is dict and tool.get("type") == "function"]
                return {"mode": mode, "names": [shown_name(f.get("namespace"), f.get("name")) for f in functions]}
    raise ValueError("")


_TYPED = {"type": "object", "properties": {"type": {"type": "string"}}}
_FORMAT = '{"type": "text", "json_object" or "json_schema"}, the last with "name" and "schema"'
TEXT = Table(
    (Parameter(("format",), Kind(_FORMAT, shared.read_response_format, _TYPED), "guide"),), kinds.ignored("verbosity")
)
_OF_SUMMARIES = ("context", "generate_summary", "mode", "summary")
REASONING = Table((Parameter(("effort",), kinds.TEXT, "reasoning_effort"),), kinds.ignored(*_OF_SUMMARIES))
"""The members of `text` and `reasoning`."""

_ITEMS = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TYPED, "maxItems": content.MOST_MESSAGES}]}
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
        *kinds.ignored("stream_options", *_NO_MEANING, *_OF_CALLERS),
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
    """The tools of a request in chat's form; namespaces and names of functions by the names that models see."""

    def __init__(self, raw: Any, problems: Problems) -> None:
        self.tools: list[dict[str, Any]] = []
        self.functions: dict[str, tuple[str, str]] = {}
        self._problems = problems
        self._add_all(raw, "tools", "")

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
        match tool:
            case {"type": "function"}:
                shown = shown_name(namespace, tool.get("name"))
                self.tools += chat.function_tool(tool, "parameters", place, self._problems, shown)
                self.functions[shown] = (namespace, str(tool.get("name")))
            case {"type": "namespace", "name": name} if not namespace and chat.is_name(name):
                self._add_all(tool.get("tools"), f"{place}.tools", name)
            case {"type": str(kind)} if kind.startswith(_LEFT_OUT):
                self._problems.left_out.append(f"{place} ({kind[:80]})")
            case _:
                self._problems.unsupported.append(
                    f"'{place}' is {show(tool)}, and only functions are run, by the client: give "
                    '{"type": "function", "name", "description", "parameters"}'
                )


_PATH, _STORED = "/v1/responses", "/v1/responses/{response}"


class Responses(OpenAiLike):
    """OpenAI's Responses, whole (a `response`) and as events, and stored ones.

    Source: the types of OpenAI's Python package 3.57 (`types/responses/`) and what Codex 0.171 and the Agents SDK send.
    A request becomes a chat (`api.chat`): its items are messages, `instructions` and the role `developer` are the
    system's.

    A response is stored unless `store` is false (`api.kept`): `previous_response_id` begins with its conversation, and
    an `item_reference` means one of its items. What OpenAI's servers would run (`background`, hosted tools,
    conversations, prompt templates) is refused by name. A tool that searches the web or makes images is left out, and a
    header says so, because Codex sends one with every request.
    """

    title = "OpenAI Responses"
    paths = (_PATH,)
    pages = (_STORED,)
    removals = (_STORED,)
    tables = MappingProxyType({_PATH: (FIELDS,)})
    descriptions = read_operations("responses.toml")
    statuses = MappingProxyType({errors.UnknownAdapterError: 404})

    def size(self, request: RawRequest, model: ModelContext) -> int:
        """The bytes of the body and of the stored responses, which `parse` reads too."""
        return len(request.body) + model.kept.size_of(request.key)

    def parse(self, request: RawRequest, model: ModelContext) -> Call:
        payload, problems = read_object(request, "input"), Problems.of(model.options)
        values = FIELDS.read(payload, problems, "field")
        values |= TEXT.read(values.get("text", {}), problems, "member of 'text'")
        values |= REASONING.read(values.get("reasoning", {}), problems, "member of 'reasoning'")
        stored = Stored(model, request.key)
        items = Items(stored, problems)
        messages = items.read(payload.get("input"), values.get("previous"), values.get("instructions"))
        values |= chat.fit_messages(messages, model, problems)
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
        generation, parsing = chat.chat_request(values, sampling, logprobs, tools, model)
        if generation.guide is not None and generation.guide_from is None:
            generation = replace(generation, guide_from="text")
        code = secrets.token_hex(16)
        stores = values.get("store", True) and model.options.stored_responses_memory > 0
        own = orjson.dumps(items.own) if stores else b""
        keep = partial(stored.keep, f"resp_{code}", own, values.get("previous", "")) if stores else None
        members, encodes = _members(payload, model, stores=stores), _ENCODED in included
        answer = Answer(code, members, declared.functions, encodes, keep)
        encoder = AnswerEncoder(answer, parsing, stream=values.get("stream", False), logprobs=logprobs)
        return Call((generation,), encoder, problems.headers)

    def page(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """A stored response."""
        name = request.parameters["response"]
        for model in models:
            if model.context is not None and (found := model.context.kept.find(request.key, name)) is not None:
                return Reply(200, "application/json", found[0])
        raise _unknown(name)

    def remove(self, request: RawRequest, models: Sequence[ModelStatus]) -> Reply:
        """Remove a stored response; those that follow it have lost their beginning."""
        name = request.parameters["response"]
        if any(model.context is not None and model.context.kept.remove(request.key, name) for model in models):
            return Reply.json({"id": name, "object": "response", "deleted": True})
        raise _unknown(name)


def _unknown(name: str) -> errors.UnknownPathError:
    return errors.UnknownPathError(
        f"there is no stored response {show(name)}: it has expired, was not stored, or belongs to another API key"
    )


_REPEATED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "user")),
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
"""The members of a response that repeat its request, with their values where the request has none."""


def _members(payload: dict[str, Any], model: ModelContext, *, stores: bool) -> dict[str, Any]:
    """The members of a response that do not depend on its output."""
    own = {"background": False, "created_at": int(time.time()), "model": model.name, "service_tier": "default"}
    given = {name: value for name, value in payload.items() if name in _REPEATED and value is not None}
    return {**_REPEATED, **given, **own, "store": stores}


RESPONSES = Responses()
