"""Encoders that call the output formatter of a model directory."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import orjson

from djl_trtllm.api.base import Prompt, ResponseEncoder
from djl_trtllm.api.custom import djl_python_shim
from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.errors import GenerationError, RequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token

_logger = logging.getLogger(__name__)

_request_ids = itertools.count()
_EVENT = b"data: "


class ObjectEncoder:
    """Passes every JSON object of another encoder through a formatter of dictionaries."""

    def __init__(self, formatter: Callable[[Any], Any], inner: ResponseEncoder) -> None:
        self._formatter = formatter
        self._inner = inner
        self.stream = inner.stream
        self.content_type = inner.content_type
        self.wants_prompt_tokens = inner.wants_prompt_tokens

    def begin(self, prompt: Prompt) -> None:
        self._inner.begin(prompt)

    def encode(self, chunk: OutputChunk) -> bytes:
        """See `ResponseEncoder`. Raises GenerationError if the formatter raises."""
        if chunk.finished is not None and chunk.finished.error is not None:
            tokens = self._inner.encode(OutputChunk(chunk.index, chunk.tokens, None))
            return self._format(tokens) + self._inner.error(chunk.finished.error)
        return self._format(self._inner.encode(chunk))

    def error(self, error: RequestError) -> bytes:
        """The inner encoder's, unformatted: the formatter may have failed."""
        return self._inner.error(error)

    def _format(self, encoded: bytes) -> bytes:
        if self.content_type == "text/plain":
            return encoded
        # JSON has no raw newlines, so a line is an object, or blank at the end of an event.
        lines = encoded.split(b"\n")
        return b"\n".join([self._format_line(line) for line in lines])

    def _format_line(self, line: bytes) -> bytes:
        prefix = _EVENT if line.startswith(_EVENT) else b""
        content = line[len(prefix) :]
        if not content.startswith((b"{", b"[{")):
            return line  # blank or `[DONE]`
        decoded = orjson.loads(content)
        if isinstance(decoded, list):
            return prefix + orjson.dumps([self._call(item) for item in decoded])
        formatted = self._call(decoded)
        return prefix + (formatted.encode() if isinstance(formatted, str) else orjson.dumps(formatted))

    def _call(self, shown: dict[str, Any]) -> Any:
        formatted = _guarded(self._formatter, shown)
        if not isinstance(formatted, (dict, str)):
            raise GenerationError(
                f"The model's output formatter returned {type(formatted).__name__}: expected a dict or a str"
            )
        return formatted


class TokenEncoder:
    """Calls a formatter of `TextGenerationOutput` once per token; the response consists of its results.

    Without `stream`, they are sent together at the end.
    """

    wants_prompt_tokens = True

    def __init__(
        self, formatter: Callable[[Any], Any], request_input: Any, *, stream: bool, n: int, indexed_tokens: bool
    ) -> None:
        from djl_python import request_io  # type: ignore[import-not-found]  # DJL's own, or the shim

        self.stream = stream
        self.content_type = "application/jsonlines" if stream else "application/json"
        self._formatter = formatter
        self._make_token = request_io.Token
        # DJL's own package has one form of sequence; the shim has the form that the formatter was written for.
        if request_io.Sequence is djl_python_shim.Sequence and not indexed_tokens:
            make_sequence: Any = djl_python_shim.ThreeValueSequence
        else:
            make_sequence = request_io.Sequence
        request_input.request_id = next(_request_ids)
        self._output = request_io.TextGenerationOutput(request_id=request_input.request_id, input=request_input)
        self._output.sequences.update({index: make_sequence() for index in range(n)})
        self._output.other_sequences_indices = list(range(1, n))
        self._running = n
        self._last_id = -1
        self._pending: list[str] = []
        self._broken = False

    def begin(self, prompt: Prompt) -> None:
        self._output.input.input_text = prompt.text
        self._output.prompt_tokens_details = [
            self._make_token(token.id, token.text, token.logprob, token.special) for token in prompt.tokens
        ]

    def encode(self, chunk: OutputChunk) -> bytes:
        """See `ResponseEncoder`. Raises GenerationError if the formatter raises."""
        index, tokens, finished = chunk.index, chunk.tokens, chunk.finished
        if finished is not None and finished.error is not None:
            return self.encode(OutputChunk(index, tokens, None)) + self.error(finished.error)
        if finished is not None and not tokens:
            # The formatter receives the end together with a token, so there has to be one.
            tokens = [Token(self._last_id, "", 0.0, True)]
        for position, token in enumerate(tokens, 1):
            self._step(index, token, finished if position == len(tokens) else None)
        if not self.stream and self._running:
            return b""
        text, self._pending = "".join(self._pending), []
        return text.encode(errors="replace")

    def error(self, error: RequestError) -> bytes:
        """The formatter's output for a last token that is an error; a line of JSON if the formatter fails."""
        if not self._broken and self.stream:
            token = self._make_token(-1, "", -1.0, True, str(error))
            self._output.finished = True
            self._output.set_next_token(token, 0, is_last_token=True, finish_reason=FINISH_REASONS[FinishReason.ERROR])
            try:
                return str(self._formatter(self._output)).encode(errors="replace")
            except (Exception, SystemExit):
                _logger.exception("The model's output formatter failed on an error")
        return orjson.dumps({"error": str(error), "code": 424}, option=orjson.OPT_APPEND_NEWLINE)

    def _step(self, index: int, token: Token, finished: SequenceResult | None) -> None:
        self._last_id = token.id
        if finished is not None:
            self._running -= 1
            self._output.finished = self._running == 0
            if finished.cumulative_logprob is not None:
                self._output.sequences[index].cumulative_log_prob = finished.cumulative_logprob
        self._output.set_next_token(
            self._make_token(token.id, token.text, token.logprob, token.special or None),
            index,
            is_last_token=finished is not None,
            finish_reason=None if finished is None else FINISH_REASONS[finished.reason],
        )
        self._broken = True
        formatted = _guarded(self._formatter, self._output)
        if not isinstance(formatted, str):
            raise GenerationError(f"The model's output formatter returned {type(formatted).__name__}: expected a str")
        self._broken = False
        self._pending.append(formatted)


def _guarded(formatter: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return formatter(argument)
    except (Exception, SystemExit) as error:
        _logger.exception("The model's output formatter failed")
        raise GenerationError(f"The model's output formatter raised {type(error).__name__}: {error}") from error
