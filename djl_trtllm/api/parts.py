"""Answers in parts, for APIs whose response is a list: reasoning, text and tool calls, in the order of the output."""

from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum

from djl_trtllm.api import output_parsers as parsers
from djl_trtllm.api.base import Prompt, ResponseEncoder
from djl_trtllm.api.chat import Parsing
from djl_trtllm.api.choices import json_items, token_logprobs
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk, SequenceResult, Token


class PartKind(Enum):
    """What a part of an answer is."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Part:
    """A part of an answer, the `index`th. A call has its function's `name`, its `call_id`, and its arguments as `text`.

    `logprobs` are the log-probabilities of a text's tokens, if the request wants them, part by part (`json_items`).
    """

    index: int
    kind: PartKind
    name: str = ""
    call_id: str = ""
    logprobs: list[bytes] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartsEncoder(ResponseEncoder):
    """Encodes the one sequence of a request, as a stream of events about its parts, or as a body with all of them.

    An answer without output is one empty text. `finished` is its end, as soon as that is known.
    """

    def __init__(self, parsing: Parsing, *, stream: bool, logprobs: bool = False) -> None:
        self.stream = stream
        self.content_type = "text/event-stream" if stream else "application/json"
        self.parts: list[Part] = []
        self.prompt_tokens = self.reasoning_tokens = 0
        self.finished: SequenceResult | None = None
        self._parsing = parsing
        self._logprobs = logprobs
        self._parser: parsers.OutputParser = parsers.PlainParser()
        self._begun = self._failed = self._dropped = False

    def begin(self, prompt: Prompt) -> None:
        self.prompt_tokens = prompt.length
        self._parser = self._parsing.parser(prompt.text)

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        data = b"" if self._begun or not self.stream else self.head()
        self._begun = True
        finished, tokens = chunk.finished, chunk.tokens
        data += self._take("".join([token.text for token in tokens]), tokens, end=finished is not None)
        self.finished = finished  # what ends a part before is no limit
        if finished is None:
            return data
        if finished.error is not None:
            return data + self.error(finished.error) if self.stream else b""
        if not self.parts:
            data += self._open(PartKind.TEXT)
        if self.stream:
            data += self.closed(self.parts[-1])
        return data + self.end(finished)

    def error(self, error: RequestError) -> bytes:
        self._failed = True
        return self.failure(error)

    @property
    def calls(self) -> bool:
        """Whether the answer has a tool call."""
        return any(part.kind is PartKind.CALL for part in self.parts)

    def _take(self, text: str, tokens: list[Token], *, end: bool) -> bytes:
        """The events of more text. Log-probabilities are in the first event of their tokens."""
        found = self._parser.feed(text) if text else []
        if end:
            found += self._parser.finish()
        data, shown = [], tokens if self._logprobs else []
        for event in found:
            if isinstance(event, parsers.CallStart):
                tools = self._parsing.tools
                assert tools is not None
                self._dropped = not tools.parallel and self.calls
                if not self._dropped:
                    data.append(self._open(PartKind.CALL, event.name, tools.format.new_id()))
                continue
            kind = _KINDS[type(event)]
            if kind is PartKind.CALL and self._dropped:
                continue
            if not self.parts or self.parts[-1].kind is not kind:
                data.append(self._open(kind))
            part = self.parts[-1]
            part.pieces.append(event.text)
            new: list[Token] = []
            if kind is PartKind.TEXT and shown:
                new, shown = shown, []
                part.logprobs.append(json_items(token_logprobs(new)))
            if self.stream:
                data.append(self.more(part, event.text, part.logprobs[-1:] if new else []))
        if self.parts and self.parts[-1].kind is PartKind.REASONING:
            self.reasoning_tokens += len(tokens)
        return b"".join(data)

    def _open(self, kind: PartKind, name: str = "", call_id: str = "") -> bytes:
        before = self.closed(self.parts[-1]) if self.parts and self.stream else b""
        self.parts.append(Part(len(self.parts), kind, name=name, call_id=call_id))
        return before + self.opened(self.parts[-1]) if self.stream else b""

    @abstractmethod
    def head(self) -> bytes:
        """The events that a stream begins with."""

    @abstractmethod
    def opened(self, part: Part) -> bytes:
        """The events with which a part begins."""

    @abstractmethod
    def more(self, part: Part, text: str, logprobs: list[bytes]) -> bytes:
        """The event of more text of the last part, and of its log-probabilities, if they are wanted."""

    @abstractmethod
    def closed(self, part: Part) -> bytes:
        """The events with which a part ends."""

    @abstractmethod
    def end(self, finished: SequenceResult) -> bytes:
        """The last events, or the body."""

    @abstractmethod
    def failure(self, error: RequestError) -> bytes:
        """The last event of a stream that cannot be finished."""


_KINDS = {
    parsers.Content: PartKind.TEXT,
    parsers.Reasoning: PartKind.REASONING,
    parsers.CallArguments: PartKind.CALL,
}
