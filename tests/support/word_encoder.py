"""Chunks of a rolling batch, and an encoder whose bytes show what it was given."""

from __future__ import annotations

from djl_trtllm.api import Prompt
from djl_trtllm.errors import RequestError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult, Token


def chunk(text: str = "", *, ends: bool = False, error: RequestError | None = None, index: int = 0) -> OutputChunk:
    """What is new in a sequence: a text, its end by length, its end by an error."""
    reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
    finished = SequenceResult(reason, 1, None, None, error=error) if ends or error is not None else None
    return OutputChunk(index, [Token(5, text, None, False)] if text else [], finished)


class WordEncoder:
    """The texts, and `.` at the end; `!` is how an answer ends that cannot go on."""

    content_type = "text/words"
    wants_prompt_tokens = False

    def __init__(self, *, stream: bool = True, last: bytes = b"!") -> None:
        self.stream = stream
        self.failure: Exception | None = None
        self._last = last
        self._text = ""

    def begin(self, prompt: Prompt) -> None:
        pass

    def encode(self, chunk: OutputChunk) -> bytes:
        if self.failure is not None:
            raise self.failure
        self._text += "".join(token.text for token in chunk.tokens)
        if chunk.finished is not None:
            self._text += "." if chunk.finished.error is None else "?"
        if not self.stream and chunk.finished is None:
            return b""
        text, self._text = self._text, ""
        return text.encode()

    def error(self, error: RequestError) -> bytes:
        assert isinstance(error, RequestError)
        return self._last
