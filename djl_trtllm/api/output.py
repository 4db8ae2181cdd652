"""The output of a call: the sequences that were generated so far, and JSON for streams of lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

import orjson

from djl_trtllm.api.base import Prompt
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk, SequenceResult, Token

_dumps = orjson.dumps


@dataclass(slots=True)
class CollectedSequence:
    """One sequence and what was generated of it so far."""

    tokens: list[Token] = field(default_factory=list)
    finished: SequenceResult | None = None

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])


class SequenceCollector:
    """Collects the chunks of a response. The rolling batch numbers the sequences, the best first if it ranks them.

    `count` sequences of each of `generations`, one generation's after the other.
    """

    def __init__(self, count: int, generations: int = 1) -> None:
        self.sequences = [CollectedSequence() for _ in range(count * generations)]
        self._count = count
        self._running = len(self.sequences)

    def add(self, chunk: OutputChunk) -> bool:
        """Add a chunk. Returns True if it ended the last running sequence."""
        sequence = self.sequences[chunk.generation * self._count + chunk.index]
        sequence.tokens += chunk.tokens
        if chunk.finished is None:
            return False
        sequence.finished = chunk.finished
        self._running -= 1
        return self._running == 0


class WholeEncoder(ABC):
    """A `ResponseEncoder` of one body, which `_body` makes when every sequence has ended.

    A chunk that ends with an error adds nothing: no byte was sent yet, so the caller replies with the error.
    """

    stream = False
    content_type = "application/json"
    wants_prompt_tokens = False

    def __init__(self, count: int, generations: int = 1) -> None:
        self._output = SequenceCollector(count, generations)

    @abstractmethod
    def begin(self, prompt: Prompt) -> None:
        """Receive a prompt, see `ResponseEncoder`."""

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is not None and chunk.finished.error is not None:
            return b""
        return self._body() if self._output.add(chunk) else b""

    def error(self, error: RequestError) -> bytes:
        """Nothing: no byte of a whole response is sent before its end."""
        return b""

    @abstractmethod
    def _body(self) -> bytes:
        """The response."""


def dump_line(value: object) -> bytes:
    """JSON for line-based formats: escapes the characters that `str.splitlines` treats as line ends.

    JSON allows U+0085, U+2028 and U+2029 unescaped, but clients that read lines of text (httpx, and so
    huggingface_hub) would end a line there.
    """
    data: bytes = _dumps(value)
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )
