"""What of the output a request wants to see, and the generated sequences it is taken from."""

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
    """The view of one request's output.

    `inputs` is the prompt as `details` and `return_full_text` show it. `n` sequences are shown, the best
    first. `stream` is what the request asked for; a formatter may have its own mind. `logprobs` and `include_usage`
    concern chat only, `id` (unique) and `created` (seconds since the epoch) too.
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
        """Takes over what tokenising found out."""
        self.inputs = prompt.text
        self.prompt_length = prompt.length
        if self.prefill:
            self.prompt_tokens = prompt.tokens


@dataclass(slots=True)
class GeneratedSequence:
    """One sequence while it grows."""

    tokens: list[Token] = field(default_factory=list)
    finished: SequenceResult | None = None

    @property
    def text(self) -> str:
        """What was generated so far."""
        return "".join([token.text for token in self.tokens])


class Sequences:
    """The sequences of one request that are shown. The rolling batch numbers them, best first where it ranks them."""

    def __init__(self, count: int) -> None:
        self.all = [GeneratedSequence() for _ in range(count)]
        self._running = count

    def add(self, update: OutputChunk) -> bool:
        """Takes the update in; True if it ended the last running sequence."""
        sequence = self.all[update.index]
        sequence.tokens += update.tokens
        if update.finished is None:
            return False
        sequence.finished = update.finished
        self._running -= 1
        return self._running == 0


class WholeResponseEncoder(ABC):
    """A `ResponseEncoder` whose answer is one body, made by `_body` when every sequence has ended."""

    stream = False
    content_type = "application/json"

    def __init__(self, presentation: Presentation) -> None:
        self._presentation = presentation
        self._sequences = Sequences(presentation.n)

    @property
    def wants_prompt_tokens(self) -> bool:
        """See `ResponseEncoder`."""
        return self._presentation.prefill

    def begin(self, prompt: Prompt) -> None:
        """See `ResponseEncoder`."""
        self._presentation.begin(prompt)

    def encode(self, update: OutputChunk) -> bytes:
        """See `ResponseEncoder`."""
        if update.finished is not None and update.finished.error is not None:
            return b""
        return self._body() if self._sequences.add(update) else b""

    def error(self, error: RequestError) -> bytes:
        """Nothing: no byte of a whole answer is sent before its end."""
        return b""

    @abstractmethod
    def _body(self) -> bytes:
        """The answer."""


def dump_line(value: object) -> bytes:
    """JSON for line-based formats: without the characters that `str.splitlines` takes for line ends.

    JSON allows U+0085, U+2028 and U+2029 unescaped, and clients that read lines of text (httpx, and so
    huggingface_hub) would cut a line there.
    """
    data: bytes = _dumps(value)
    if data.isascii():
        return data
    return (
        data.replace(b"\xc2\x85", b"\\u0085").replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def lmi_token(token: Token) -> dict[str, Any]:
    """A token as the LMI schema has it; `special_token` only where it is true."""
    shown: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        shown["special_token"] = True
    return shown


def tgi_token(token: Token) -> dict[str, Any]:
    """A token as TGI has it. `special` is always there: TGI's own client requires it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
