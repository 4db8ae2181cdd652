"""What a response shows of the output."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.output import WholeEncoder
from djl_trtllm.request import Token, new_uuid


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
    id: str = field(default_factory=lambda: new_uuid().hex)
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


class WholeResponseEncoder(WholeEncoder, PresentingEncoder):
    """What those of whole responses share."""

    def __init__(self, presentation: Presentation) -> None:
        WholeEncoder.__init__(self, presentation.n)
        PresentingEncoder.__init__(self, presentation)
        self.wants_prompt_tokens = presentation.prefill

    def begin(self, prompt: Prompt) -> None:
        self._presentation.begin(prompt)


def lmi_token(token: Token) -> dict[str, Any]:
    """A token in the LMI schema; `special_token` only if it is true."""
    shown: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        shown["special_token"] = True
    return shown


def tgi_token(token: Token) -> dict[str, Any]:
    """A token in TGI's schema. `special` is always present: TGI's own client requires it."""
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
