"""The encoders of `/generate` and `/generate_stream`.

In a stream every token is an event. If the end comes without a token (a stop string removed the text), the last event's
token repeats the last id with an empty text and is special, so that joined texts are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.output import CollectedSequence, WholeEncoder, dump_line
from djl_trtllm.api.tgi.errors import error_body
from djl_trtllm.api.tgi.timing import Headers, Timing
from djl_trtllm.errors import RequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token

FINISH_REASONS = {
    FinishReason.END_TOKEN: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "length",
    # TGI has no word for these.
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "error",
}


@dataclass(slots=True)
class Shown:
    """What one response shows of `n` sequences: all of them, the best first.

    `as_list` wraps the response in a list, as `POST /` does. The rest comes when the prompt is tokenised.
    """

    details: bool = False
    full_text: bool = False
    prefill: bool = False
    as_list: bool = False
    n: int = 1
    inputs: str = ""
    input_length: int = 0
    prompt_tokens: Sequence[Token] = ()

    def begin(self, prompt: Prompt) -> None:
        self.inputs, self.input_length = prompt.text, prompt.length
        if self.prefill:
            self.prompt_tokens = prompt.tokens

    def text(self, generated: str) -> str:
        return self.inputs + generated if self.full_text else generated


class GenerateEncoder(WholeEncoder):
    """`{"generated_text", "details"?}`."""

    def __init__(self, shown: Shown, timing: Timing) -> None:
        super().__init__(shown.n)
        self._shown = shown
        self._timing = timing
        self.wants_prompt_tokens = shown.prefill

    def begin(self, prompt: Prompt) -> None:
        self._shown.begin(prompt)
        self._timing.tokenised(prompt.length)

    def headers(self) -> Headers:
        """The headers of the response, when it is complete."""
        finished = self._output.sequences[0].finished
        assert finished is not None
        return self._timing.headers(finished)

    def _body(self) -> bytes:
        best, *others = self._output.sequences
        response: dict[str, Any] = {"generated_text": self._shown.text(best.text)}
        if self._shown.details:
            response["details"] = self._details(best)
            if others:
                response["details"]["best_of_sequences"] = [
                    {"generated_text": self._shown.text(other.text), **self._details(other)} for other in others
                ]
        return orjson.dumps([response] if self._shown.as_list else response)

    def _details(self, sequence: CollectedSequence) -> dict[str, Any]:
        assert sequence.finished is not None
        return {
            **_end(sequence.finished),
            "prefill": [{"id": token.id, "text": token.text, "logprob": None} for token in self._shown.prompt_tokens],
            "tokens": [_token(token) for token in sequence.tokens],
        }


class GenerateStreamEncoder:
    """Events `{"index", "token", "generated_text", "details"}`; the last has the whole text, and details if wanted."""

    stream = True
    content_type = "text/event-stream"
    wants_prompt_tokens = False

    def __init__(self, shown: Shown) -> None:
        self._shown = shown
        self._texts: list[str] = []
        self._last_id = -1

    def begin(self, prompt: Prompt) -> None:
        self._shown.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        tokens, finished = chunk.tokens, chunk.finished
        if finished is None:
            return self._event(tokens[0]) if len(tokens) == 1 else b"".join([self._event(token) for token in tokens])
        if finished.error is not None:
            return b"".join([self._event(token) for token in tokens]) + self.error(finished.error)
        before = b"".join([self._event(token) for token in tokens[:-1]])
        return before + self._last(tokens[-1] if tokens else Token(self._last_id, "", 0.0, True), finished)

    def error(self, error: RequestError) -> bytes:
        """A last event with TGI's `error` and `error_type`, which its clients raise."""
        return b"data:" + dump_line(error_body(error)) + b"\n\n"

    def _event(self, token: Token) -> bytes:
        self._texts.append(token.text)
        self._last_id = token.id
        return b'data:{"index":%d,"token":%b,"generated_text":null,"details":null}\n\n' % (
            len(self._texts),
            dump_line(_token(token)),
        )

    def _last(self, token: Token, finished: SequenceResult) -> bytes:
        self._texts.append(token.text)
        details = {**_end(finished), "input_length": self._shown.input_length} if self._shown.details else None
        event = {
            "index": len(self._texts),
            "token": _token(token),
            "generated_text": self._shown.text("".join(self._texts)),
            "details": details,
        }
        return b"data:" + dump_line(event) + b"\n\n"


def _end(finished: SequenceResult) -> dict[str, Any]:
    return {
        "finish_reason": FINISH_REASONS[finished.reason],
        "generated_tokens": finished.generated_tokens,
        "seed": finished.seed,
    }


def _token(token: Token) -> dict[str, Any]:
    return {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
