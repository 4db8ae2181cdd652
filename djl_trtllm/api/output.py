"""The output of a call: the sequences that were generated so far, and JSON for streams of lines."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson

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
