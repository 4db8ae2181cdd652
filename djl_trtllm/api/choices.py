"""Responses with `choices`, as objects and as streams: those of OpenAI's API.

At the end, what all of OpenAI's APIs have: names of models, errors and log-probabilities.
"""

import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from msgspec.structs import replace

from djl_trtllm import errors
from djl_trtllm.api.base import (
    CollectedSequence,
    Dialect,
    Prompt,
    RawRequest,
    ResponseEncoder,
    WholeEncoder,
    dump_line,
    nearest_row,
)
from djl_trtllm.api.parameters import read_object, show
from djl_trtllm.request import OutputChunk, RankedToken, SequenceResult, Token, new_hex_id, total

_USAGE = b"\0"
"""Marks the place of the usage in an event. JSON has no such byte."""


@dataclass(slots=True)
class Response:
    """The response to one request: `n` sequences for each of its `generations`.

    `prefix` begins its id; clients read `fingerprint` as `system_fingerprint`. With `include_usage`, and in every event
    with `continuous_usage`, a stream has its usage. `echo`: the prompt stands before its output. `prompt_logprobs`: it
    has those of the prompt, as vLLM's. `token_ids`: it has the ids of its tokens. `tgi`: its parts have what TGI's own
    client requires. `prompts`, `prompt_ids` and `prompt_tokens` (their lengths in all) come when the prompts are
    tokenised, `cached` at the end of a sequence: the least number of tokens of each prompt that one of its sequences
    had from the prefix cache.
    """

    prefix: str
    model: str
    fingerprint: str = ""
    n: int = 1
    generations: int = 1
    stream: bool = False
    logprobs: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    echo: bool = False
    prompt_logprobs: bool = False
    token_ids: bool = False
    tgi: bool = False
    id: str = field(default_factory=new_hex_id)
    created: int = field(default_factory=lambda: int(time.time()))
    prompts: list[str] = field(default_factory=list)
    prompt_ids: list[list[int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: dict[int, int] = field(default_factory=dict)

    def begin(self, prompt: Prompt) -> None:
        self.prompt_tokens += prompt.length
        if self.echo:
            self.prompts.append(prompt.text)
        if self.token_ids:
            self.prompt_ids.append([token.id for token in prompt.tokens])

    def count_cached(self, generation: int, finished: SequenceResult) -> None:
        self.cached[generation] = min(finished.cached_tokens, self.cached.get(generation, finished.cached_tokens))

    @property
    def detailed(self) -> bool:
        """Whether a stream shows tokens that add no text."""
        return self.logprobs or self.token_ids

    def shown_ids(self, tokens: Sequence[Token], generation: int | None = None) -> dict[str, Any]:
        """The ids of tokens, and of the prompt of a generation, as members of a choice (vLLM's)."""
        if not self.token_ids:
            return {}
        shown: dict[str, Any] = {"token_ids": [token.id for token in tokens]}
        return shown if generation is None else shown | {"prompt_token_ids": self.prompt_ids[generation]}

    def head(self, kind: str) -> dict[str, Any]:
        """The members that every object of the response begins with."""
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return head | {"system_fingerprint": self.fingerprint}

    def usage(self, completion_tokens: int, accepted: int | None = None, drafted: int | None = None) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }
        if accepted is not None:
            usage["completion_tokens_details"] = details = {"accepted_prediction_tokens": accepted}
            if drafted is not None:
                details["rejected_prediction_tokens"] = max(0, drafted - accepted)
        return usage


def _sum(known: int | None, more: int | None) -> int | None:
    """The sum of the counts that are known. (`total` is None where one is not.)"""
    return known if more is None else (known or 0) + more


class ObjectEncoder(WholeEncoder):
    """Encodes one JSON object with `choices`."""

    kind: str
    """The value of `object`."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.n, response.generations)
        self.response = response
        self.wants_prompt_tokens = response.token_ids

    def begin(self, prompt: Prompt) -> None:
        self.response.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.prompt is not None:
            self.take_prompt(chunk.generation, chunk.prompt)
        failed = chunk.finished is not None and chunk.finished.error is not None
        if self.response.logprobs and chunk.tokens and not failed:
            # A token with 20 alternatives takes 40 µs: they are not left to the end, nor kept until then.
            self.take_logprobs(chunk.generation * self.response.n + chunk.index, chunk.tokens)
            plain = [Token(each.id, each.text, each.logprob, each.special) for each in chunk.tokens]
            chunk = replace(chunk, tokens=plain)
        return super().encode(chunk)

    def take_prompt(self, generation: int, tokens: list[RankedToken]) -> None:
        """The log-probabilities of a generation's prompt have come."""

    @abstractmethod
    def take_logprobs(self, index: int, tokens: list[Token]) -> None:
        """Tokens of a choice have come, whose log-probabilities the response has."""

    def _body(self) -> bytes:
        choices: list[dict[str, Any]] = []
        generated, accepted = 0, None
        for index, sequence in enumerate(self._output.sequences):
            assert sequence.finished is not None
            generated += sequence.finished.generated_tokens
            accepted = _sum(accepted, sequence.finished.accepted_tokens)
            self.response.count_cached(index // self.response.n, sequence.finished)
            choices.append(self.choice(index, sequence, sequence.finished))
        drafted = total(each.finished.drafted_tokens for each in self._output.sequences if each.finished)
        usage = self.response.usage(generated, accepted, drafted)
        return orjson.dumps(self.response.head(self.kind) | {"choices": choices, "usage": usage} | self.more())

    @abstractmethod
    def choice(self, index: int, sequence: CollectedSequence, finished: SequenceResult) -> dict[str, Any]:
        """One of `choices`."""

    def more(self) -> dict[str, Any]:
        """Members of the response beside `choices`."""
        return {}


class EventEncoder(ResponseEncoder):
    """Encodes objects with one choice: server-sent events and `[DONE]`, or without `sse` lines."""

    stream = True
    kind: str
    """The value of `object`."""

    def __init__(self, response: Response, *, sse: bool = True) -> None:
        self.response = response
        self.wants_prompt_tokens = response.token_ids
        self.content_type = "text/event-stream" if sse else "application/jsonlines"
        before, self._stop, self._done = (b"data: ", b"\n\n", b"data: [DONE]\n\n") if sse else (b"", b"\n", b"")
        # With `include_usage`, every chunk but the last has a `usage` of null, or its own.
        self._counts = response.include_usage and response.continuous_usage
        usage = b',"usage":' + (_USAGE if self._counts else b"null") if response.include_usage else b""
        self._before = before + orjson.dumps(response.head(self.kind))[:-1] + b',"choices":['
        self._after = b"]" + usage + b"}" + self._stop
        self._running = response.n * response.generations
        self._generated = 0
        self._accepted: int | None = None
        self._drafted: list[int | None] = []
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
        self.response.count_cached(chunk.generation, finished)
        data = self._counted(self.events(index, chunk.tokens, finished), chunk)
        self._accepted = _sum(self._accepted, finished.accepted_tokens)
        self._drafted.append(finished.drafted_tokens)
        self._generated += finished.generated_tokens
        self._running -= 1
        return data if self._running else data + self._end()

    def error(self, error: errors.RequestError) -> bytes:
        self._failed = True  # the other choices end too
        return self.failure(error) + self._done

    @abstractmethod
    def failure(self, error: errors.RequestError) -> bytes:
        """The last event, with the error."""

    @abstractmethod
    def events(self, index: int, tokens: list[Token], finished: SequenceResult | None) -> bytes:
        """The events of a choice for its new tokens, and for its end."""

    def _counted(self, data: bytes, chunk: OutputChunk) -> bytes:
        """The events with the usage so far, where each has one."""
        if not self._counts:
            return data
        self._streamed += len(chunk.tokens)
        return data.replace(_USAGE, dump_line(self.response.usage(self._streamed)))

    def _event(self, choice: dict[str, Any], more: bytes = b"") -> bytes:
        """An object with this choice; `more` has its further members, each behind a comma."""
        return self._before + dump_line(choice) + b"]" + more + self._after[1:]

    def _end(self) -> bytes:
        if not self.response.include_usage:
            return self._done
        usage = dump_line(self.response.usage(self._generated, self._accepted, total(self._drafted)))
        return b'%b],"usage":%b}%b%b' % (self._before, usage, self._stop, self._done)


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
    errors.UnknownPathError: (_INVALID, "not_found"),
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


class OpenAiLike(Dialect):
    """A dialect as OpenAI's APIs are: bodies name their model as `model`, and errors are objects."""

    names_model = True

    def model_name(self, request: RawRequest) -> str | None:
        """The model that the body names; None for "" and for none. Raises InvalidRequestError."""
        name = read_object(request).get("model")
        if name is not None and type(name) is not str:
            raise errors.InvalidRequestError(f"'model' is {show(name)}: expected a string")
        return name or None

    def error_body(self, message: str, error: errors.RequestError | None) -> object:
        return {"error": error_object(message, error)}


def json_items(values: list[Any]) -> bytes:
    """The JSON of a list without its brackets."""
    return orjson.dumps(values)[1:-1]


def json_list(parts: Iterable[bytes]) -> orjson.Fragment:
    """The list whose items came as `json_items` part by part."""
    return orjson.Fragment(b"[%b]" % b",".join(filter(None, parts)))


def token_logprobs(tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities. One that the engine did not report is null."""
    return [
        {
            "token": token.text,
            "logprob": token.logprob,
            "bytes": _bytes(token.text),
            "top_logprobs": _alternatives(token) if isinstance(token, RankedToken) else [],
        }
        for token in tokens
    ]


def _alternatives(token: RankedToken) -> list[dict[str, Any]]:
    return [{"token": each.text, "logprob": each.logprob, "bytes": _bytes(each.text)} for each in token.top]


def _bytes(text: str) -> list[int] | None:
    return list(text.encode()) if text else None
