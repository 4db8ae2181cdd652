"""The result of one request of an offline batch, kept until its last sequence has ended."""

from __future__ import annotations

from djl_trtllm.api import Prompt
from djl_trtllm.errors import DjlTrtllmError, RequestError
from djl_trtllm.request import GenerationRequest, OutputChunk, SequenceResult


class OfflineSequence:
    """One generated sequence. `finished` is None where the request was refused before it ran."""

    __slots__ = ("_texts", "finished", "logprobs", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.finished: SequenceResult | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The output text, without a stop string that ended it."""
        return "".join(self._texts)

    def add(self, chunk: OutputChunk) -> None:
        for token in chunk.tokens:
            self.token_ids.append(token.id)
            self.logprobs.append(token.logprob)
            self._texts.append(token.text)
        self.finished = chunk.finished


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
        self.sequences = [OfflineSequence() for _ in range(request.sampling.n)]
        self.failure: DjlTrtllmError | None = None
        self.wants_prompt_tokens = wants_prompt_tokens
        self._unfinished = len(self.sequences)

    @property
    def complete(self) -> bool:
        """Whether every sequence has ended, or the request has failed before any began."""
        return not self._unfinished

    def begin(self, prompt: Prompt) -> None:
        self.prompt = prompt

    def encode(self, chunk: OutputChunk) -> bytes:
        self.sequences[chunk.index].add(chunk)
        if chunk.finished is not None:
            self._unfinished -= 1
            self.failure = self.failure or chunk.finished.error
        return b""

    def error(self, error: RequestError) -> bytes:
        self.fail(error)
        return b""

    def fail(self, error: DjlTrtllmError) -> None:
        self.failure = error
        self._unfinished = 0
