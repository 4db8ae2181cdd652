"""What a response shows of the output."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.output import SequenceCollector
from djl_trtllm.errors import RequestError
from djl_trtllm.request import OutputChunk, Token


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


def lmi_token(token: Token) -> dict[str, Any]:
    """A token in the LMI schema; `special_token` only if it is true."""
    shown: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        shown["special_token"] = True
    return shown


def tgi_token(token: Token) -> dict[str, Any]:
    """A token in TGI's schema. `special` is always present: TGI's own client requires it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
