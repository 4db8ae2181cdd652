"""The encoders of LMI's responses: `json`, `jsonlines`, `sse` and `none`.

The formats are those of DJL's rolling batch (LMI 0.25 to 0.32), with these differences on purpose:

- `finish_reason` is what happened (`eos_token`, `stop_sequence`, `length`, `cancelled`, `error`); DJL guessed it from
  the number of tokens and never said `stop_sequence`.
- With `tgi_compat`, details have TGI's `seed`, and TGI's `prefill` (whole) or `input_length` (streamed); every token
  says whether it is `special`; an error inside a stream also has TGI's `error` and `error_type`, which its clients
  raise.
- `generated_tokens` counts the end token, even if no token line shows it.
"""

from collections.abc import Iterable
from typing import Any

from djl_trtllm import errors
from djl_trtllm.api.base import CollectedSequence, Prompt, ResponseEncoder, dump_line
from djl_trtllm.api.families import hugging_face_error
from djl_trtllm.api.texts import PlainTextEncoder, Presentation, TextEncoder, TokenStreamEncoder, tgi_token
from djl_trtllm.request import FINISH_WORDS, FinishReason, OutputChunk, SequenceResult, Token

JSONLINES = "application/jsonlines"
EVENT_STREAM = "text/event-stream"
PLAIN = "text/plain"


def lmi_token(token: Token) -> dict[str, Any]:
    """A token in the LMI schema; `special_token` only if it is true."""
    shown: dict[str, Any] = {"id": token.id, "text": token.text, "log_prob": token.logprob}
    if token.special:
        shown["special_token"] = True
    return shown


class JsonEncoder(TextEncoder):
    """`{"generated_text", "details"?}`, in a list of one with `tgi_compat`."""

    def __init__(self, presentation: Presentation) -> None:
        super().__init__(presentation, as_list=presentation.tgi_compat)

    def details(self, sequence: CollectedSequence) -> dict[str, Any]:
        presentation = self._presentation
        assert sequence.finished is not None
        as_token = tgi_token if presentation.tgi_compat else lmi_token
        details = _end_details(presentation, sequence.finished)
        details["tokens"] = [as_token(token) for token in sequence.tokens]
        if presentation.prefill or presentation.tgi_compat:
            details["prefill"] = [as_token(token) for token in presentation.prompt_tokens]
        return details

    def other(self, sequence: CollectedSequence) -> dict[str, Any]:
        shown = self.details(sequence) | {"generated_text": self._presentation.shown_text(sequence.text)}
        del shown["inputs"]  # the best sequence's details have it
        return shown


class JsonLinesEncoder(TokenStreamEncoder):
    """`jsonlines`: `{"token"}` per token, the last with `generated_text` and `details`; `sse`: the same as events.

    The token of an error has id -1, `log_prob` -1 and the message as `error_msg`, as DJL documents.
    """

    def __init__(self, presentation: Presentation, *, sse: bool) -> None:
        super().__init__(presentation)
        self.wants_prompt_tokens = presentation.prefill
        # The hot path: one `dumps` per token, formatted into these bytes.
        self._token = tgi_token if presentation.tgi_compat else lmi_token
        self._line = b'data: {"token":%b}\n\n' if sse else b'{"token":%b}\n'
        self._whole_line = b"data: %b\n\n" if sse else b"%b\n"
        self.content_type = EVENT_STREAM if sse else JSONLINES

    def line(self, token: Token) -> bytes:
        text = token.text
        self._texts.append(text)
        self._last_id = token.id
        if token.special or self._token is tgi_token:
            return self._line % dump_line(self._token(token))
        return self._line % dump_line({"id": token.id, "text": text, "log_prob": token.logprob})

    def error(self, error: errors.RequestError) -> bytes:
        """A last line whose token has the message."""
        token = self._token(Token(-1, "", -1.0, True)) | {"error_msg": str(error)}
        finished = SequenceResult(FinishReason.ERROR, len(self._texts), None, None, error=error)
        return self._end_line(token, finished)

    def end(self, token: Token, finished: SequenceResult) -> bytes:
        return self._end_line(self._token(token), finished)

    def _end_line(self, token: dict[str, Any], finished: SequenceResult) -> bytes:
        presentation = self._presentation
        line: dict[str, Any] = {"token": token, "generated_text": self._text}
        if presentation.details:
            line["details"] = details = _end_details(presentation, finished)
            if presentation.tgi_compat:
                details["input_length"] = presentation.prompt_length
            if presentation.prefill:
                details["prefill"] = [self._token(token) for token in presentation.prompt_tokens]
        elif finished.error is not None:
            line["details"] = {"finish_reason": FINISH_WORDS[finished.reason]}
        if finished.error is not None and presentation.tgi_compat:
            line |= hugging_face_error(str(finished.error), finished.error)
        return self._whole_line % dump_line(line)


class WholePlainEncoder(TextEncoder):
    """The text alone, at the end."""

    content_type = PLAIN

    def _body(self) -> bytes:
        return self._presentation.shown_text(self._output.sequences[0].text).encode()

    def details(self, sequence: CollectedSequence) -> dict[str, Any]:
        return {}


def plain_encoder(presentation: Presentation) -> ResponseEncoder:
    """`none`: the generated text only, streamed if the request asks for a stream."""
    streams = presentation.stream and presentation.n == 1
    return PlainTextEncoder(presentation, PLAIN) if streams else WholePlainEncoder(presentation)


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
