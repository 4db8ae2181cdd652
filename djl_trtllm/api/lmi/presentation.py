"""What a response shows of the output, and the collected sequences from which it is made."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from djl_trtllm.api.base import Prompt
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk, SequenceResult, Token

_dumps = orjson.dumps


@dataclass(slots=True)
class Presentation:
    """What one response shows.

    `inputs` is the prompt for `details` and `return_full_text`. The response has `n` sequences, the best first.
    `stream` is the value in the request; an encoder may differ. `logprobs`, `include_usage`, `id` (unique) and
    `created` (seconds since the epoch) are for chat only.
    """

    inputs: str = ""
    stream: bool = False
    details: bool = False
    return_full_text: bool = False
    prefill: bool = False
    tgi_compat: bool = False
    n: int = 1
    logprobs: bool = False
    include_usage: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    prompt_length: int = 0
    prompt_tokens: Sequence[Token] = ()

    def begin(self, prompt: Prompt) -> None:
        self.inputs = prompt.text
        self.prompt_length = prompt.length
        if self.prefill:
            self.prompt_tokens = prompt.tokens

    def shown_text(self, generated: str) -> str:
        """The generated text, with `return_full_text` behind the prompt."""
        return self.inputs + generated if self.return_full_text else generated


@dataclass(slots=True)
class CollectedSequence:
    """One sequence and what was generated of it so far."""

    tokens: list[Token] = field(default_factory=list)
    finished: SequenceResult | None = None

    @property
    def text(self) -> str:
        return "".join([token.text for token in self.tokens])


class SequenceCollector:
    """Collects the chunks of a response. The rolling batch numbers the sequences, the best first if it ranks them."""

    def __init__(self, count: int) -> None:
        self.sequences = [CollectedSequence() for _ in range(count)]
        self._running = count

    def add(self, chunk: OutputChunk) -> bool:
        """Add a chunk. Returns True if it ended the last running sequence."""
        sequence = self.sequences[chunk.index]
        sequence.tokens += chunk.tokens
        if chunk.finished is None:
            return False
        sequence.finished = chunk.finished
        self._running -= 1
        return self._running == 0


class PresentingEncoder:
    """What the `ResponseEncoder`s of this dialect share."""

    wants_prompt_tokens = False

    def __init__(self, presentation: Presentation) -> None:
        self._presentation = presentation

    def begin(self, prompt: Prompt) -> None:
        self._presentation.begin(prompt)


class WholeResponseEncoder(PresentingEncoder, ABC):
    """A `ResponseEncoder` of one body, which `_body` makes when every sequence has ended."""

    stream = False
    content_type = "application/json"

    def __init__(self, presentation: Presentation) -> None:
        super().__init__(presentation)
        self.wants_prompt_tokens = presentation.prefill
        self._output = SequenceCollector(presentation.n)

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


def lmi_token(token: Token) -> dict[str, Any]:
    """A token in the LMI schema; `special_token` only if it is true."""
    shown: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        shown["special_token"] = True
    return shown


def tgi_token(token: Token) -> dict[str, Any]:
    """A token in TGI's schema. `special` is always present: TGI's own client requires it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
