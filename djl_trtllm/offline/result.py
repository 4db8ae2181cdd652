"""The result of one request of an offline batch, kept until its last sequence has ended."""

from __future__ import annotations

from djl_trtllm.api import Prompt
from djl_trtllm.api.output import SequenceCollector
from djl_trtllm.errors import DjlTrtllmError, RequestError
from djl_trtllm.request import GenerationRequest, OutputChunk


class OfflineResult:
    """The result of request `number` of a batch (from 0). A `ResponseEncoder` that keeps the chunks and makes no bytes.

    `failure` is why it failed, if it did; the sequences hold what was generated until then.
    """

    stream = False
    content_type = ""

    def __init__(self, number: int, request: GenerationRequest, *, wants_prompt_tokens: bool) -> None:
        self.number = number
        self.prompt: Prompt | None = None
        """The prompt as the model sees it; None where the request was refused before it was tokenised."""
        self._output = SequenceCollector(request.sampling.n)
        self.sequences = self._output.sequences
        self.failure: DjlTrtllmError | None = None
        self.wants_prompt_tokens = wants_prompt_tokens
        self.complete = False
        """Whether every sequence has ended, or the request has failed before any began."""

    def begin(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def encode(self, chunk: OutputChunk) -> bytes:
        self.complete = self._output.add(chunk)
        if chunk.finished is not None:
            self.failure = self.failure or chunk.finished.error
        return b""

    def error(self, error: RequestError) -> bytes:
        self.fail(error)
        return b""

    def fail(self, error: DjlTrtllmError) -> None:
        self.failure = error
        self.complete = True
