"""One streamed response: when its tokens arrived, and how they were counted.

Servers send several tokens in one event when they are busy, so events are not tokens. Where a server says how many
tokens it has sent (in every event, or at the end), that is the count.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from array import array
from enum import Enum
from typing import Any

import msgspec
import orjson

_ERROR_LENGTH = 300


class Counted(Enum):
    """Where the number of tokens is from; the later ones are less exact."""

    EACH = "token by token"
    USAGE = "usage in each event"
    TOTAL = "usage at the end, spread over the events"
    REQUESTED = "the requested length, spread over the events"
    EVENTS = "events, because the server reports no number of tokens"


class Stream:
    """A request and its response. Times are those of one clock, in seconds; `intended` is when it should be sent."""

    __slots__ = (
        "arrived",
        "counted",
        "counts",
        "detail",
        "ended",
        "error",
        "intended",
        "prompt_tokens",
        "requested",
        "sent",
        "times",
        "tokens",
    )

    def __init__(self, intended: float, requested: int = 0) -> None:
        self.intended = self.sent = intended
        self.requested = requested
        self.ended: float | None = None
        self.error: str | None = None
        self.detail = ""
        self.counted = Counted.EVENTS
        self.prompt_tokens: int | None = None
        self.tokens = 0
        self.times = array("d")
        self.counts = array("L")

    def add(self, now: float, tokens: int) -> None:
        """This number of tokens has arrived."""
        self.times.append(now)
        self.counts.append(tokens)
        self.tokens += tokens

    def settle(self, total: int, counted: Counted) -> None:
        """The response had `total` tokens: spread those that are missing or too many evenly over the events."""
        self.counted = counted
        if not self.times or total == self.tokens:
            return
        before, seen, given = self.tokens, 0, 0
        for index, count in enumerate(self.counts):
            seen += count
            upto = round(total * seen / before)
            self.counts[index] = upto - given
            given = upto
        self.tokens = total

    def intervals(self) -> list[float]:
        """Seconds between two tokens: of tokens that arrive together, each has its share of the time before them."""
        return [
            (later - earlier) / count
            for earlier, later, count in zip(self.times, self.times[1:], self.counts[1:], strict=False)
            for _ in range(count)
        ]


class Reader:
    """Reads the body of a response in pieces as they arrive. This one keeps the text of an error."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        self.body = (self.body + data)[: 1 << 20]

    def end(self) -> None:
        """The body is complete."""


class _Lines(Reader, ABC):
    """A body of lines, which are read when they are complete."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._now = 0.0

    def feed(self, data: bytes, now: float) -> None:
        self._now = now
        data = self.body + data
        cut = data.rfind(b"\n") + 1
        self.body = data[cut:]
        if cut:
            self.read(data[:cut], now)

    @abstractmethod
    def read(self, lines: bytes, now: float) -> None:
        """Count the tokens of complete lines, and of the last one at the end."""

    def settle(self) -> None:
        """All lines are read."""

    @abstractmethod
    def whole(self) -> bool:
        """Whether the response says that nothing is missing."""

    def end(self) -> None:
        stream = self.stream
        if self.body:
            self.read(self.body, self._now)
        self.settle()
        if stream.error is None and not stream.tokens:
            stream.error, stream.detail = "a response without tokens", _text(self.body)
        elif stream.error is None and not self.whole():
            # Bodies without a length end with their connection, and proxies end those of servers that are gone.
            stream.error = "the response ended before its last token"


_TOKEN = b'"token":'
_WHOLE_TEXT = re.compile(rb'"generated_text":\s*(?!null|\s)')


class TokenReader(_Lines):
    """LMI's `jsonlines` and TGI's events: a line for each token. Quotes inside texts are escaped in JSON.

    The last one has the whole text, too.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._last = b""

    def read(self, lines: bytes, now: float) -> None:
        count = lines.count(_TOKEN)
        if b'"error' in lines:
            # Its line has the form of a token, but none was generated.
            count -= self._errors(lines)
        if count > 0:
            self.stream.counted = Counted.EACH
            self.stream.add(now, count)
            self._last = lines

    def whole(self) -> bool:
        return _WHOLE_TEXT.search(self._last) is not None

    def _errors(self, lines: bytes) -> int:
        """Note the first line with an error. Returns how many of those lines look like tokens."""
        found = 0
        for line in lines.splitlines():
            event = _object(line)
            text = event.get("error_msg") or event.get("error")
            if text is None and isinstance(event.get("token"), dict):
                text = event["token"].get("error_msg")
            if text is not None:
                found += "token" in event
                self.stream.error = self.stream.error or _in_stream(text)
        return found


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    text_output: str | None = None


_END = b"[DONE]"
_decode = msgspec.json.Decoder(_Event).decode


class EventReader(_Lines):
    """OpenAI's events, also as LMI's lines without `data:`, and those of Triton's `generate_stream`.

    Triton's have no sign of the last one.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._usages = 0
        self._total: int | None = None
        self._choices = self._ended = False

    def read(self, lines: bytes, now: float) -> None:
        stream, count = self.stream, 0
        for line in lines.splitlines():
            line = line.removeprefix(b"data:").lstrip()
            if not line.startswith(b"{"):
                self._ended = self._ended or line == _END
                continue  # other fields of events, blank lines
            try:
                event = _decode(line)
            except msgspec.MsgspecError:
                stream.error = stream.error or f"an event that is not understood: {_text(line)}"
                continue
            if event.error is not None:
                stream.error = stream.error or _in_stream(event.error)
            if event.choices:
                self._choices = True
                self._ended = self._ended or any(choice.finish_reason for choice in event.choices)
            if event.usage is not None:
                stream.prompt_tokens = event.usage.prompt_tokens or stream.prompt_tokens
            if event.usage is not None and event.usage.completion_tokens:
                count += self._by_usage(event.usage.completion_tokens, count)
            elif _has_text(event):
                count += 1
        if count > 0:
            stream.add(now, count)

    def _by_usage(self, total: int, pending: int) -> int:
        """Tokens that are new by an event's usage, or 0 where only the last event has one."""
        self._usages += 1
        self._total = total
        known = self.stream.tokens + pending
        # Events before the first usage were counted as they came: this is the usage at the end.
        if self._usages == 1 and known:
            self._usages -= 1
            return 0
        return max(0, total - known)

    def whole(self) -> bool:
        return self._ended or not self._choices

    def settle(self) -> None:
        stream = self.stream
        if self._total is not None:
            stream.settle(self._total, Counted.USAGE if self._usages else Counted.TOTAL)
            if stream.counted is Counted.TOTAL and len(stream.counts) == sum(stream.counts):
                stream.counted = Counted.EACH
        elif stream.requested:
            stream.settle(stream.requested, Counted.REQUESTED)


def _has_text(event: _Event) -> bool:
    if event.text_output:
        return True
    for choice in event.choices:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)):
            return True
    return False


def _object(line: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(line.removeprefix(b"data:"))
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}


def _in_stream(text: object) -> str:
    if isinstance(text, dict):
        text = text.get("message", text)
    return f"error in the stream: {str(text)[:_ERROR_LENGTH]}"


def _text(data: bytes) -> str:
    return data[:_ERROR_LENGTH].decode(errors="replace")
