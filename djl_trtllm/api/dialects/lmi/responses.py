"""The encoders of LMI's responses: `json`, `jsonlines`, `sse` and `none`.

The formats are those of DJL's rolling batch (LMI 0.25 to 0.32), with these differences on purpose:

- `finish_reason` is what happened (`eos_token`, `stop_sequence`, `length`, `cancelled`, `error`); DJL guessed it from
  the number of tokens and never said `stop_sequence`.
- With `tgi_compat`, details have TGI's `seed`, and TGI's `prefill` (whole) or `input_length` (streamed); every
  token says whether it is `special`; an error inside a stream also has TGI's `error` and `error_type`, which
  its clients raise.
- `generated_tokens` counts the end token, even if no token line shows it.

In a stream every token is a line, sent at once. If the end is known with the last token, that line is the last. If
the end comes without a token (a stop string removed the text, or the request was cancelled), one more line is sent:
its token repeats the last id with an empty text and is special, so that joined texts and summed log-probabilities are
right; its id is -1 if nothing was generated. The token of an error has id -1, `log_prob` -1 and the message as
`error_msg`, as DJL documents.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from djl_trtllm import errors
from djl_trtllm.api.base import (
    CollectedSequence,
    Prompt,
    ResponseEncoder,
    SequenceCollector,
    WholeEncoder,
    dump_line,
    nearest_row,
)
from djl_trtllm.api.front_end import HUGGING_FACE_ERRORS
from djl_trtllm.request import FINISH_WORDS, FinishReason, OutputChunk, SequenceResult, Token

DJL_ERRORS: dict[type[errors.RequestError], str | None] = {
    errors.AuthenticationError: "UnauthorizedException",
    errors.ForbiddenError: "ForbiddenException",
    errors.UnknownModelError: "ResourceNotFoundException",
    errors.UnknownPathError: "ResourceNotFoundException",
    errors.MethodNotAllowedError: "MethodNotAllowedException",
    errors.RequestTooLargeError: "RequestEntityTooLargeException",
    errors.OverloadedError: "WlmCapacityException",
    errors.TooManyRequestsError: "TooManyRequestsException",
    errors.NotReadyError: "WlmException",
    errors.RequestTimeoutError: "TranslateException",
    errors.GenerationError: None,
}
"""What DJL's front end calls an error. Errors with None, or without a row, have the handler's body."""


@dataclass(slots=True)
class Presentation:
    """What one response shows.

    `inputs` is the prompt for `details` and `return_full_text`. The response has `n` sequences, the best first.
    `stream` is the value in the request; an encoder may differ.
    """

    inputs: str = ""
    stream: bool = False
    details: bool = False
    return_full_text: bool = False
    prefill: bool = False
    tgi_compat: bool = False
    n: int = 1
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


class PresentingEncoder(ResponseEncoder):
    """The base of the encoders of this dialect."""

    def __init__(self, presentation: Presentation) -> None:
        self._presentation = presentation

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


JSONLINES = "application/jsonlines"
EVENT_STREAM = "text/event-stream"
PLAIN = "text/plain"


class JsonEncoder(PresentingEncoder, WholeEncoder):
    """`{"generated_text", "details"?}`, in a list of one with `tgi_compat`.

    With more than one sequence there are always details, and `best_of_sequences` has the others.
    """

    def __init__(self, presentation: Presentation) -> None:
        WholeEncoder.__init__(self, presentation.n)
        PresentingEncoder.__init__(self, presentation)
        self.wants_prompt_tokens = presentation.prefill

    def _body(self) -> bytes:
        presentation = self._presentation
        best, *others = self._output.sequences
        response: dict[str, Any] = {"generated_text": presentation.shown_text(best.text)}
        if presentation.details or others:
            details = self._details(best)
            if others:
                details["best_of_sequences"] = [self._other(other) for other in others]
            response["details"] = details
        return orjson.dumps([response] if presentation.tgi_compat else response)

    def _details(self, sequence: CollectedSequence) -> dict[str, Any]:
        presentation = self._presentation
        assert sequence.finished is not None
        as_token = tgi_token if presentation.tgi_compat else lmi_token
        details = _end_details(presentation, sequence.finished)
        details["tokens"] = [as_token(token) for token in sequence.tokens]
        if presentation.prefill or presentation.tgi_compat:
            details["prefill"] = [as_token(token) for token in presentation.prompt_tokens]
        return details

    def _other(self, sequence: CollectedSequence) -> dict[str, Any]:
        shown = self._details(sequence) | {"generated_text": self._presentation.shown_text(sequence.text)}
        del shown["inputs"]  # the best sequence's details have it
        return shown


class JsonLinesEncoder(PresentingEncoder):
    """`jsonlines`: `{"token"}` per token, the last with `generated_text` and `details`; `sse`: the same as events."""

    stream = True

    def __init__(self, presentation: Presentation, *, sse: bool) -> None:
        super().__init__(presentation)
        self.wants_prompt_tokens = presentation.prefill
        self._texts: list[str] = []
        self._last_id = -1
        # The hot path: one `dumps` per token, formatted into these bytes.
        self._tgi = presentation.tgi_compat
        self._token = tgi_token if presentation.tgi_compat else lmi_token
        self._line = b'data: {"token":%b}\n\n' if sse else b'{"token":%b}\n'
        self._whole_line = b"data: %b\n\n" if sse else b"%b\n"
        self.content_type = EVENT_STREAM if sse else JSONLINES

    def encode(self, chunk: OutputChunk) -> bytes:
        tokens, finished = chunk.tokens, chunk.finished
        line = self._tgi_line if self._tgi else self._lmi_line
        if finished is None:
            # Most chunks are one token, which needs no join.
            return line(tokens[0]) if len(tokens) == 1 else b"".join([line(token) for token in tokens])
        if finished.error is not None:
            return b"".join([line(token) for token in tokens]) + self.error(finished.error)
        before = b"".join([line(token) for token in tokens[:-1]])
        last = tokens[-1] if tokens else Token(self._last_id, "", 0.0, True)
        self._texts.append(last.text)
        return before + self._end_line(self._token(last), finished)

    def error(self, error: errors.RequestError) -> bytes:
        """A last line whose token has the message."""
        token = self._token(Token(-1, "", -1.0, True)) | {"error_msg": str(error)}
        finished = SequenceResult(FinishReason.ERROR, len(self._texts), None, None, error=error)
        return self._end_line(token, finished)

    def _lmi_line(self, token: Token) -> bytes:
        text = token.text
        self._texts.append(text)
        self._last_id = token.id
        if token.special:
            return self._line % dump_line(lmi_token(token))
        return self._line % dump_line({"id": token.id, "text": text, "log_prob": token.logprob})

    def _tgi_line(self, token: Token) -> bytes:
        self._texts.append(token.text)
        self._last_id = token.id
        return self._line % dump_line(tgi_token(token))

    def _end_line(self, token: dict[str, Any], finished: SequenceResult) -> bytes:
        presentation = self._presentation
        line: dict[str, Any] = {
            "token": token,
            "generated_text": presentation.shown_text("".join(self._texts)),
        }
        if presentation.details:
            details = _end_details(presentation, finished)
            if presentation.tgi_compat:
                details["input_length"] = presentation.prompt_length
            if presentation.prefill:
                details["prefill"] = [self._token(token) for token in presentation.prompt_tokens]
            line["details"] = details
        elif finished.error is not None:
            line["details"] = {"finish_reason": FINISH_WORDS[finished.reason]}
        if finished.error is not None and presentation.tgi_compat:
            line["error"] = str(finished.error)
            line["error_type"] = nearest_row(HUGGING_FACE_ERRORS, finished.error)
        return self._whole_line % dump_line(line)


class PlainTextEncoder(PresentingEncoder):
    """`none`: the generated text only, streamed if the request asks for a stream.

    Plain text cannot express a failure: the body then has no end.
    """

    content_type = PLAIN

    def __init__(self, presentation: Presentation) -> None:
        super().__init__(presentation)
        self._output = SequenceCollector(presentation.n)
        self._begun = False
        self.stream = presentation.stream and presentation.n == 1

    def encode(self, chunk: OutputChunk) -> bytes:
        if chunk.finished is not None and chunk.finished.error is not None:
            raise chunk.finished.error
        if self.stream:
            text = "".join([token.text for token in chunk.tokens])
        elif self._output.add(chunk):
            text = self._output.sequences[0].text
        else:
            return b""
        if not self._begun:
            text = self._presentation.shown_text(text)
        self._begun = True
        return text.encode()


_EVENT = b"data: "
_DONE = b"[DONE]"


class LinesEncoder(ResponseEncoder):
    """The events of another encoder as lines of JSON: without `data: ` and without `[DONE]`."""

    stream = True
    content_type = JSONLINES

    def __init__(self, events: ResponseEncoder) -> None:
        self._events = events
        self.wants_prompt_tokens = events.wants_prompt_tokens

    def begin(self, prompt: Prompt) -> None:
        self._events.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        return _lines_of(self._events.encode(chunk).split(b"\n"))

    def error(self, error: errors.RequestError) -> bytes:
        return _lines_of(self._events.error(error).split(b"\n"))


def _lines_of(events: Iterable[bytes]) -> bytes:
    data = (line[len(_EVENT) :] for line in events if line.startswith(_EVENT))
    return b"".join([line + b"\n" for line in data if line != _DONE])


def _end_details(presentation: Presentation, finished: SequenceResult) -> dict[str, Any]:
    details: dict[str, Any] = {
        "finish_reason": FINISH_WORDS[finished.reason],
        "generated_tokens": finished.generated_tokens,
        "inputs": presentation.inputs,
    }
    if presentation.tgi_compat:
        details["seed"] = finished.seed
    if finished.accepted_tokens is not None:
        details["accepted_tokens"] = finished.accepted_tokens
    if finished.drafted_tokens is not None:
        details["drafted_tokens"] = finished.drafted_tokens
    if finished.reseeded:
        details["reseeded"] = True
    return details
