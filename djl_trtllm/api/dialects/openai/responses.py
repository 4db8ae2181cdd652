"""OpenAI's responses: errors, and the encoders of chats and completions, whole and streamed.

At the end, tools: what those of a request mean for the template and the engine, and the encoders of outputs that may
have calls.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from djl_trtllm import errors
from djl_trtllm.api import choices
from djl_trtllm.api import output_parsers as parsers
from djl_trtllm.api.base import (
    CollectedSequence,
    ModelContext,
    Prompt,
    dump_line,
    nearest_row,
)
from djl_trtllm.api.choices import Response
from djl_trtllm.api.parameters import Problems, show
from djl_trtllm.api.sampling import read_schema
from djl_trtllm.config import ReasoningFormat, ToolCallFormat
from djl_trtllm.request import FinishReason, Guide, RankedToken, SequenceResult, Token

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_PARAMETER = re.compile(r"'([\w.\[\]]+)'[^;]*")
"""A message about one parameter, which begins with its name."""


_ERROR_TYPES: dict[type[errors.RequestError], tuple[str, str | None]] = {
    errors.InvalidRequestError: (_INVALID, None),
    errors.PromptTooLongError: (_INVALID, "context_length_exceeded"),
    errors.UnknownAdapterError: (_INVALID, "model_not_found"),
    errors.UnsupportedParameterError: (_INVALID, "unsupported_parameter"),
    errors.UnknownModelError: (_INVALID, "model_not_found"),
    errors.AuthenticationError: (_INVALID, "invalid_api_key"),
    errors.ForbiddenError: (_INVALID, "insufficient_permissions"),
    errors.MethodNotAllowedError: (_INVALID, "method_not_allowed"),
    errors.RequestTooLargeError: (_INVALID, "request_too_large"),
    errors.OverloadedError: ("overloaded_error", "overloaded"),
    errors.TooManyRequestsError: ("requests", "rate_limit_exceeded"),
    errors.NotReadyError: (_SERVER, "not_ready"),
    errors.RequestTimeoutError: (_SERVER, "timeout"),
    errors.GenerationError: (_SERVER, None),
}
"""The `type` and `code` of errors."""


def error_object(message: str, error: errors.RequestError | None) -> dict[str, str | None]:
    """The value of `error`. `param` is the parameter that the message is about, if it is about one."""
    kind, code = nearest_row(_ERROR_TYPES, error)
    named = _PARAMETER.fullmatch(message) if isinstance(error, errors.InvalidRequestError) else None
    return {"message": message, "type": kind, "param": named and named.group(1), "code": code}


FINISH_REASONS = {
    FinishReason.END_TOKEN: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    # OpenAI has no word for these; `abort` is vLLM's.
    FinishReason.CANCELLED: "abort",
    FinishReason.ERROR: "error",
}


class EventEncoder(choices.EventEncoder):
    """The base of the encoders of streams."""

    def failure(self, error: errors.RequestError) -> bytes:
        """An event with the error, which OpenAI's clients raise."""
        return b"data: " + dump_line({"error": error_object(str(error), error)}) + b"\n\n"


class ChatEncoder(choices.ObjectEncoder):
    """One `chat.completion`."""

    kind = "chat.completion"

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": sequence.text, "refusal": None},
            "logprobs": chat_logprobs(sequence.tokens) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
        }


class ChatStreamEncoder(EventEncoder):
    """`chat.completion.chunk`s. Each choice begins with an empty chunk that has its role."""

    kind = "chat.completion.chunk"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        self._begun = [False] * response.n
        # The hot path: only the content differs.
        self._content = [
            b'%b{"index":%d,"delta":{"content":%%b},"logprobs":null,"finish_reason":null}%b'
            % (self._before.replace(b"%", b"%%"), index, self._after)
            for index in range(response.n)
        ]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Tokens without a text add nothing, unless their log-probabilities are wanted."""
        events = b"" if self._begun[index] else self.first(index)
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.logprobs and tokens:
            events += self._delta(index, {"content": text}, tokens)
        elif text:
            events += self._content[index] % dump_line(text)
        if finished is not None:
            events += self._delta(index, {}, reason=FINISH_REASONS[finished.reason])
        return events

    def first(self, index: int) -> bytes:
        """The event that a choice begins with, b"" if it has begun."""
        if self._begun[index]:
            return b""
        self._begun[index] = True
        return self._delta(index, {"role": "assistant", "content": "", "refusal": None})

    def _delta(
        self, index: int, delta: dict[str, Any], tokens: list[Token] | None = None, reason: str | None = None
    ) -> bytes:
        shown = None if tokens is None else chat_logprobs(tokens)
        return self._event({"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason})


def chat_logprobs(tokens: list[Token]) -> dict[str, Any]:
    """The `logprobs` of a choice. A log-probability that the engine did not report is null."""
    content = [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": _bytes(token.text),
            "top_logprobs": _alternatives(token) if isinstance(token, RankedToken) else [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _alternatives(token: RankedToken) -> list[dict[str, Any]]:
    return [{"token": each.text, "logprob": each.logprob, "bytes": _bytes(each.text)} for each in token.top]


def _bytes(text: str) -> list[int] | None:
    return list(text.encode()) if text else None


class CompletionEncoder(choices.ObjectEncoder):
    """One `text_completion`. The choices of the first prompt come first."""

    kind = "text_completion"

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        echoed = self.response.prompts[index // self.response.n] if self.response.echo else ""
        return {
            "index": index,
            "text": echoed + sequence.text,
            "logprobs": completion_logprobs(sequence.tokens, 0) if self.response.logprobs else None,
            "finish_reason": FINISH_REASONS[finished.reason],
        }


class CompletionStreamEncoder(EventEncoder):
    """`text_completion`s with new text. With `echo`, a choice begins with its prompt."""

    kind = "text_completion"

    def __init__(self, response: Response) -> None:
        super().__init__(response)
        count = response.n * response.generations
        self._echoed = [not response.echo] * count
        self._offsets = [0] * count
        self._text = [
            b'%b{"index":%d,"text":%%b,"logprobs":null,"finish_reason":null}%b'
            % (self._before.replace(b"%", b"%%"), index, self._after)
            for index in range(count)
        ]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Tokens without a text add nothing, unless their log-probabilities are wanted."""
        events = b""
        if not self._echoed[index]:
            self._echoed[index] = True
            events = self._text[index] % dump_line(self.response.prompts[index // self.response.n])
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        if self.response.logprobs and tokens:
            events += self._choice(index, text, completion_logprobs(tokens, self._offsets[index]))
            self._offsets[index] += len(text)
        elif text:
            events += self._text[index] % dump_line(text)
        if finished is not None:
            events += self._choice(index, "", reason=FINISH_REASONS[finished.reason])
        return events

    def _choice(self, index: int, text: str, shown: dict[str, Any] | None = None, reason: str | None = None) -> bytes:
        return self._event({"index": index, "text": text, "logprobs": shown, "finish_reason": reason})


def completion_logprobs(tokens: list[Token], offset: int) -> dict[str, Any]:
    """The `logprobs` of a choice whose first token begins at `offset`, in characters of the choice's text."""
    offsets: list[int] = []
    ranked = [token for token in tokens if isinstance(token, RankedToken)]
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{each.text: each.logprob for each in token.top} for token in ranked] if ranked else None,
        "text_offset": offsets,
    }


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request whose model may call them.

    `parser` makes one for each sequence, None if calls stay in the text. `shown_tokens` are the markers it looks for.
    `guide` constrains the output to calls. `parallel`: more than one call is returned.
    """

    parser: Callable[[], parsers.OutputParser] | None
    format: parsers.ToolFormat
    shown_tokens: tuple[str, ...] = ()
    guide: Guide | None = None
    parallel: bool = True


_PARSERS = [name for name in ToolCallFormat.all_values() if name not in ("auto", "none")]


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
    own = parsers.tool_format(setting, source)
    parallel = values.get("parallel_tool_calls", True)
    if forced:
        guide = _guide(choice, tools, parallel, values, problems)
        parser = (
            functools.partial(parsers.call_parser, parsers.REQUIRED, {})
            if choice == "required"
            else functools.partial(parsers.NamedParser, choice["name"])
        )
        return ToolUse(parser, own or parsers.REQUIRED, (), guide, parallel)
    if own is None:
        problems.unsupported.append(
            "'tools' is given, and the model's chat template does not show how the model writes tool calls: set "
            f"option.tool_call_parser to one of {', '.join(_PARSERS)}, or to none to get them as text"
        )
        return None
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    own_parser = None if setting is ToolCallFormat.NONE else functools.partial(parsers.call_parser, own, schemas)
    return ToolUse(own_parser, own, own.markers, None, parallel)


def fit_messages(messages: list[dict[str, Any]], model: ModelContext, problems: Problems) -> list[dict[str, Any]]:
    """The messages with the ids of tool calls as the model's chat template takes them. Rendering does the same with
    their arguments (`ChatTemplate.render`)."""
    if not any("tool_calls" in message or "tool_call_id" in message for message in messages):
        return messages
    own = parsers.tool_format(model.options.tool_call_parser, model.tokenizer.chat_source(True)) or parsers.REQUIRED
    ids: dict[str, str] = {}
    return [_fit(message, f"messages[{at}]", own, ids, problems) for at, message in enumerate(messages)]


def _fit(
    message: dict[str, Any], where: str, own: parsers.ToolFormat, ids: dict[str, str], problems: Problems
) -> dict[str, Any]:
    """One message; `ids` are those of the calls before it, as the template takes them."""
    message = dict(message)
    if type(own_id := message.get("tool_call_id")) is str:
        message["tool_call_id"] = ids.get(own_id) or own.fit_id(own_id)
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
            fitted[-1]["id"] = ids[call["id"]] = own.fit_id(call["id"], function["name"], len(ids))
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
        if choice == "required":
            strict = any(function.get("strict") for function in functions.values())
            return read_schema(_list_schema(functions, parallel), strict)
        function = functions[choice["name"]]
        return read_schema(_parameters(function), function.get("strict"))
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


_ENDS = (FinishReason.END_TOKEN, FinishReason.STOP)


@dataclass(frozen=True, slots=True)
class Parsing:
    """What to look for in the output."""

    tools: ToolUse | None
    reasoning: ReasoningFormat

    @property
    def needed(self) -> bool:
        return self.reasoning is not ReasoningFormat.NONE or (self.tools is not None and self.tools.parser is not None)

    @property
    def shown_tokens(self) -> tuple[str, ...]:
        """The special tokens that the parsers have to see."""
        tools = () if self.tools is None else self.tools.shown_tokens
        return (*tools, *parsers.reasoning_markers(self.reasoning))

    def choice(self, prompt: str) -> ParsedChoice:
        parser = (
            self.tools.parser() if self.tools is not None and self.tools.parser is not None else parsers.PlainParser()
        )
        return ParsedChoice(parsers.with_reasoning(self.reasoning, parser, prompt), self.tools)


@dataclass(slots=True)
class ParsedChoice:
    """One sequence: what was found in it becomes deltas of OpenAI's stream."""

    parser: parsers.OutputParser
    tools: ToolUse | None
    calls: int = 0
    _dropped: bool = field(default=False)

    def deltas(self, text: str, *, end: bool) -> list[dict[str, Any]]:
        """The deltas of more text, and of its end. Events of one kind that follow each other are one delta."""
        events = self.parser.feed(text) if text else []
        if end:
            events += self.parser.finish()
        deltas: list[dict[str, Any]] = []
        for event in events:
            delta = self._delta(event)
            if delta is not None and not (deltas and _join(deltas[-1], delta)):
                deltas.append(delta)
        return deltas

    def reason(self, finished: SequenceResult) -> str:
        return "tool_calls" if self.calls and finished.reason in _ENDS else FINISH_REASONS[finished.reason]

    def _delta(self, event: parsers.Event) -> dict[str, Any] | None:
        match event:
            case parsers.Content(text):
                return {"content": text}
            case parsers.Reasoning(text):
                return {"reasoning_content": text}
            case parsers.CallStart(name):
                assert self.tools is not None
                self._dropped = self.calls > 0 and not self.tools.parallel
                if self._dropped:
                    return None
                self.calls += 1
                function = {"name": name, "arguments": ""}
                call = {"index": self.calls - 1, "id": self.tools.format.new_id(), "type": "function"}
                return {"tool_calls": [call | {"function": function}]}
            case parsers.CallArguments(text):
                if self._dropped:
                    return None
                return {"tool_calls": [{"index": self.calls - 1, "function": {"arguments": text}}]}


def _join(last: dict[str, Any], delta: dict[str, Any]) -> bool:
    """Add a delta to the last one. False if it is of another kind, or begins a call."""
    ((kind, value),) = delta.items()
    if kind not in last or (kind == "tool_calls" and ("id" in value[0] or "id" in last[kind][0])):
        return False
    if kind == "tool_calls":
        last[kind][0]["function"]["arguments"] += value[0]["function"]["arguments"]
    else:
        last[kind] += value
    return True


class ParsedChatEncoder(ChatEncoder):
    """One `chat.completion`, with the tool calls and the reasoning that its text has."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._prompt = ""

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._prompt = prompt.text

    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        parsed = self._parsing.choice(self._prompt)
        texts: dict[str, str] = {}
        calls: list[dict[str, Any]] = []
        for delta in parsed.deltas(sequence.text, end=True):
            for call in delta.pop("tool_calls", ()):
                if "id" in call:
                    calls.append({key: value for key, value in call.items() if key != "index"})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            for kind, text in delta.items():
                texts[kind] = texts.get(kind, "") + text
        choice = super().choice(index, sequence, finished)
        message = choice["message"]
        message["content"] = texts.get("content", None if calls else "")
        if "reasoning_content" in texts:
            message["reasoning_content"] = texts["reasoning_content"]
        if calls:
            message["tool_calls"] = calls
        choice["finish_reason"] = parsed.reason(finished)
        return choice


class ParsedChatStreamEncoder(ChatStreamEncoder):
    """`chat.completion.chunk`s, with tool calls and reasoning as they are found in the text."""

    def __init__(self, response: Response, parsing: Parsing) -> None:
        super().__init__(response)
        self._parsing = parsing
        self._choices: list[ParsedChoice] = []
        # The hot path: deltas that differ in one text only.
        self._thought = [content.replace(b'{"content":', b'{"reasoning_content":') for content in self._content]

    def begin(self, prompt: Prompt) -> None:
        super().begin(prompt)
        self._choices = [self._parsing.choice(prompt.text) for _ in range(self.response.n)]

    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """See `EventEncoder`. Log-probabilities are in the first event of their tokens."""
        choice, events = self._choices[index], self.first(index)
        deltas = choice.deltas("".join([token.text for token in tokens]), end=finished is not None)
        if self.response.logprobs and tokens:
            events += self._delta(index, deltas.pop(0) if deltas else {"content": ""}, tokens)
        for delta in deltas:
            if "content" in delta:
                events += self._content[index] % dump_line(delta["content"])
            elif "reasoning_content" in delta:
                events += self._thought[index] % dump_line(delta["reasoning_content"])
            else:
                events += self._delta(index, delta)
        if finished is not None:
            events += self._delta(index, {}, reason=choice.reason(finished))
        return events
