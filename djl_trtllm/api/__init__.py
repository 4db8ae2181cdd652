"""Dialects: a dialect is a pair of pure functions, parse and frame.

`parse` turns a request body into a `Call`: the `GenerationRequest` that the rolling batch runs, and the
`ResponseEncoder`
that turns the updates it sends back into the bytes of the answer. A whole answer and a stream are framed by the
same calls: whole encoders return `b""` until every sequence has ended, then the body. What goes wrong becomes a
`Reply` through the dialect's error table. Nothing here waits, and nothing here knows HTTP or a socket.

    call = lmi.parse(body, content_type, defaults)   # raises InvalidRequestError
    call.encoder.begin(prompt)                        # once, when the prompt is tokenised
    chunk = call.encoder.frame(update)                # per update
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from djl_trtllm.errors import RequestError
from djl_trtllm.request import GenerationRequest, OutputChunk, Token


class Prompt(NamedTuple):
    """The prompt as the model sees it.

    `text` is after the chat template, `length` in tokens. `tokens` may stay empty unless the encoder
    `wants_prompt_tokens`.
    """

    text: str
    length: int
    tokens: Sequence[Token] = ()


class ResponseEncoder(Protocol):
    """Frames the answer to one request. One object per request: it holds what was generated so far."""

    @property
    def stream(self) -> bool:
        """Whether bytes are to be sent as they come. False: one body, at the end."""

    @property
    def content_type(self) -> str:
        """Media type of the answer."""

    @property
    def wants_prompt_tokens(self) -> bool:
        """Whether `begin` needs `Prompt.tokens`."""

    def begin(self, prompt: Prompt) -> None:
        """Tells what was tokenised; called at most once, before the first `encode`."""

    def encode(self, update: OutputChunk) -> bytes:
        """The bytes that this update adds to the answer; `b""` if none.

        An update that ends with an error is framed as its tokens and then `error`. A caller that has sent nothing
        yet answers with the dialect's error table instead, so that the client gets a status. Raises RequestError
        only where a model directory's own formatter failed.
        """

    def error(self, error: RequestError) -> bytes:
        """The last bytes of an answer that was already begun and cannot be finished.

        `b""` if the format has no way to say it; closing the connection without ending the body then has to.
        """


class Call(NamedTuple):
    """A parsed request: what to generate and how to answer."""

    request: GenerationRequest
    encoder: ResponseEncoder


class Reply(NamedTuple):
    """A whole answer that needs no model: an error, or a status."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


class Defaults(NamedTuple):
    """What the model's options say about requests and answers.

    `output_formatter`, `tgi_compat` and `bedrock_compat` are the options of these names. `max_best_of` bounds how
    many sequences one request may generate.
    """

    output_formatter: str | None = None
    tgi_compat: bool = False
    bedrock_compat: bool = False
    max_best_of: int = 16


__all__ = ["Call", "Defaults", "Prompt", "Reply", "ResponseEncoder"]
