"""OpenAI's responses: errors, and the encoders of chats and completions, whole and streamed."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api.base import (
    CollectedSequence,
    Prompt,
    WholeEncoder,
    dump_line,
    nearest_row,
)
from djl_trtllm.request import FinishReason, OutputChunk, RankedToken, SequenceResult, Token, new_uuid

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

DONE = b"data: [DONE]\n\n"

_USAGE = b"\0"
"""Where an event's usage belongs; JSON has no such byte."""


@dataclass(slots=True)
class Response:
    """The response to one request: `n` sequences for each of its `generations`.

    `prefix` begins its id. With `include_usage`, and in every event with `continuous_usage`, a stream has its usage.
    `echo`: the prompt stands before its output. `prompts` and `prompt_tokens` (their lengths in
    all) come when the prompts are tokenised.
    """

    prefix: str
    model: str
    n: int = 1
    generations: int = 1
    stream: bool = False
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    id: str = field(default_factory=lambda: new_uuid().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0

    def begin(self, prompt: Prompt) -> None:
        self.prompt_tokens += prompt.length
        if self.echo:
            self.prompts.append(prompt.text)

    def head(self, kind: str) -> dict[str, Any]:
        """The members that every object of the response begins with."""
        return {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }


class ObjectEncoder(WholeEncoder):
    """Encodes one JSON object with `choices`."""

    kind: str
    """The value of `object`."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.n, response.generations)
        self.response = response

    def begin(self, prompt: Prompt) -> None:
        self.response.begin(prompt)

    def _body(self) -> bytes:
        choices: list[dict[str, Any]] = []
        generated = 0
        for index, sequence in enumerate(self._output.sequences):
            assert sequence.finished is not None
            generated += sequence.finished.generated_tokens
            choices.append(self.choice(index, sequence, sequence.finished))
        return orjson.dumps(
            self.response.head(self.kind) | {"choices": choices, "usage": self.response.usage(generated)}
        )

    @abstractmethod
    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        """One of `choices`."""


class EventEncoder(ABC):
    """A `ResponseEncoder` of server-sent events: an object with one choice for each chunk, then `[DONE]`.

    A subclass has `text_event`, the bytes between those of `head` and the text of an event, and `events`.
    """

    stream = True
    content_type = "text/event-stream"
    wants_prompt_tokens = False
    kind: str
    """The value of `object`."""

    def __init__(self, response: Response) -> None:
        self.response = response
        # With `include_usage`, every chunk but the last has a `usage` of null, or its own.
        self._counts = response.include_usage and response.continuous_usage
        usage = b',"usage":' + (_USAGE if self._counts else b"null") if response.include_usage else b""
        self._before = b"data: " + orjson.dumps(response.head(self.kind))[:-1] + b',"choices":['
        self._after = b"]" + usage + b"}\n\n"
        self._running = response.n * response.generations
        self._generated = 0
        self._streamed = 0
        self._failed = False

    def begin(self, prompt: Prompt) -> None:
        self.response.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        index, finished = chunk.generation * self.response.n + chunk.index, chunk.finished
        if finished is None:
            data = self.events(index, chunk.tokens, None)
            return self._counted(data, chunk) if self._counts else data
        if finished.error is not None:
            return self._counted(self.events(index, chunk.tokens, None), chunk) + self.error(finished.error)
        data = self._counted(self.events(index, chunk.tokens, finished), chunk)
        self._generated += finished.generated_tokens
        self._running -= 1
        return data if self._running else data + self._end()

    def error(self, error: errors.RequestError) -> bytes:
        """A last event with the error, which OpenAI's clients raise."""
        self._failed = True  # the other choices end too
        return b"data: " + dump_line({"error": error_object(str(error), error)}) + b"\n\n" + DONE

    @abstractmethod
    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """The events of a choice for its new tokens, and for its end."""

    def _counted(self, data: bytes, chunk: OutputChunk) -> bytes:
        """The events with the usage so far, where each has one."""
        if not self._counts:
            return data
        self._streamed += len(chunk.tokens)
        return data.replace(_USAGE, dump_line(self.response.usage(self._streamed)))

    def _event(self, choice: dict[str, Any]) -> bytes:
        return self._before + dump_line(choice) + self._after

    def _end(self) -> bytes:
        if not self.response.include_usage:
            return DONE
        usage = dump_line(self.response.usage(self._generated))
        return b'%b],"usage":%b}\n\n%b' % (self._before, usage, DONE)


class ChatEncoder(ObjectEncoder):
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


class CompletionEncoder(ObjectEncoder):
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
