"""Answers in parts: reasoning, text and tool calls, in the order of the output, with the text's log-probabilities.

`PartsReader` finds the parts of a sequence in its text. `PartsEncoder` is for APIs whose response is a list of them.
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import orjson

from djl_trtllm.api import output_parsers as parsers
from djl_trtllm.api.base import Prompt, ResponseEncoder
from djl_trtllm.api.chat import Parsing
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk, RankedToken, SequenceResult, Token


class PartKind(Enum):
    """The kinds of parts of an answer."""

    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


_KINDS = {
    parsers.Content: PartKind.TEXT,
    parsers.Reasoning: PartKind.REASONING,
    parsers.CallArguments: PartKind.CALL,
}
_CALL = PartKind.CALL  # a member of an enumeration is looked up slowly, which each token would do


@dataclass(slots=True)
class Part:
    """A part of an answer, the `index`th. A call, the `call`th, has its function's `name`, its `call_id`, and its
    arguments as `text`.

    `logprobs` are the log-probabilities of a text's tokens, if the request wants them, part by part (`json_items`).
    """

    index: int
    kind: PartKind
    name: str = ""
    call_id: str = ""
    call: int = 0
    logprobs: list[bytes] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class PartsReader:
    """Reads one sequence after this prompt: its `parts` so far, and how many `calls` are among them."""

    def __init__(self, parsing: Parsing, prompt: str) -> None:
        self.parts: list[Part] = []
        self.calls = 0
        self._parser = parsing.parser(prompt)
        self._tools = parsing.tools
        self._dropped = False

    def read(self, text: str, *, end: bool) -> Iterator[tuple[Part, str]]:
        """Yield the parts to which more text, or the end, adds something, each with the new piece: "" where a part
        begins.

        Where calls must not be parallel, only the first one is a part.
        """
        events = self._parser.feed(text) if text else []
        if end:
            events += self._parser.finish()
        for event in events:
            if isinstance(event, parsers.CallStart):
                assert self._tools is not None
                self._dropped = not self._tools.parallel and self.calls > 0
                if not self._dropped:
                    yield self.begin(PartKind.CALL, event.name, self._tools.format.new_id()), ""
                continue
            kind, text = _KINDS[type(event)], event.text
            if kind is _CALL and self._dropped:
                continue
            part = self.parts[-1] if self.parts else None
            if part is None or part.kind is not kind:
                part = self.begin(kind)
                yield part, ""
            part.pieces.append(text)
            yield part, text

    def begin(self, kind: PartKind, name: str = "", call_id: str = "") -> Part:
        """Begin a part, and return it."""
        self.parts.append(Part(len(self.parts), kind, name, call_id, self.calls))
        self.calls += kind is PartKind.CALL
        return self.parts[-1]


class PartsEncoder(ResponseEncoder):
    """Encodes the one sequence of a request, as a stream of events about its parts, or as a body with all of them.

    An answer without output is one empty text. `finished` is its end, as soon as that is known.
    """

    def __init__(self, parsing: Parsing, *, stream: bool, logprobs: bool = False) -> None:
        self.stream = stream
        self.content_type = "text/event-stream" if stream else "application/json"
        self.prompt_tokens = self.reasoning_tokens = 0
        self.finished: SequenceResult | None = None
        self._parsing = parsing
        self._logprobs = logprobs
        # Until the prompt is known. A parser of calls that has not ended refers to itself: it waits to be collected.
        self._reader = PartsReader(Parsing(None, "none"), "")
        self._begun = self._failed = False

    def begin(self, prompt: Prompt) -> None:
        self.prompt_tokens = prompt.length
        self._reader = PartsReader(self._parsing, prompt.text)

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._failed:
            return b""
        data = b"" if self._begun or not self.stream else self.head()
        self._begun = True
        finished, tokens = chunk.finished, chunk.tokens
        text = tokens[0].text if len(tokens) == 1 else "".join([token.text for token in tokens])
        data += self._take(text, tokens, end=finished is not None)
        self.finished = finished  # what ends a part before is no limit
        if finished is None:
            return data
        if finished.error is not None:
            return data + self.error(finished.error) if self.stream else b""
        if not self.parts:
            data += self._open(self._reader.begin(PartKind.TEXT))
        if self.stream:
            data += self.closed(self.parts[-1])
        return data + self.end(finished)

    def error(self, error: RequestError) -> bytes:
        self._failed = True
        return self.failure(error)

    @property
    def parts(self) -> list[Part]:
        return self._reader.parts

    @property
    def calls(self) -> bool:
        """Whether the answer has a tool call."""
        return self._reader.calls > 0

    def _take(self, text: str, tokens: list[Token], *, end: bool) -> bytes:
        """The events for more text. Log-probabilities are in the first event of their tokens."""
        data, shown = [], tokens if self._logprobs else []
        for part, piece in self._reader.read(text, end=end):
            if not part.pieces:
                data.append(self._open(part))
                continue
            new: list[Token] = []
            if shown and part.kind is PartKind.TEXT:
                new, shown = shown, []
                part.logprobs.append(json_items(token_logprobs(new)))
            if self.stream:
                data.append(self.more(part, piece, part.logprobs[-1:] if new else []))
        if self.parts and self.parts[-1].kind is PartKind.REASONING:
            self.reasoning_tokens += len(tokens)
        return b"".join(data)

    def _open(self, part: Part) -> bytes:
        """The events between the part before and this one."""
        if not self.stream:
            return b""
        return (self.closed(self.parts[part.index - 1]) if part.index else b"") + self.opened(part)

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


# -- log-probabilities -------------------------------------------------------------------------------------------------


def json_items(values: list[Any]) -> bytes:
    """The JSON of a list without its brackets."""
    return orjson.dumps(values)[1:-1]


def json_list(parts: Iterable[bytes]) -> orjson.Fragment:
    """The list whose items came as `json_items` part by part."""
    return orjson.Fragment(b"[%b]" % b",".join(filter(None, parts)))


def token_logprobs(tokens: Iterable[Token]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities, as in OpenAI's APIs. One that the engine did not report is null."""
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
