"""What all responses of this dialect have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import orjson

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.openai.errors import error_object
from djl_trtllm.api.output import CollectedSequence, WholeEncoder, dump_line
from djl_trtllm.errors import RequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token, new_uuid

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

    def error(self, error: RequestError) -> bytes:
        """A last event with the error, which OpenAI's clients raise."""
        self._failed = True  # the other choices end too
        return b"data: " + dump_line({"error": error_object(error)}) + b"\n\n" + DONE

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
