"""The base of executors that turn prompts into vectors or scores: in-flight batching by tokens.

Each iteration takes the prompt that has waited longest, and those of the nearest lengths, as many as the tokens of an
iteration allow and as long as no more than a quarter of them are there because other prompts are longer. What arrives
while one runs is in the next. A model without a KV cache needs no other scheduler.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from djl_trtllm.executor.protocol import Limits, Stats, Step, Submit
from djl_trtllm.request import FinishReason, Pooling, Sampling, TaskName

Vectors = NDArray[np.float32]
"""Vectors as an array with a row for each prompt."""

_FIRST = Submit(0, [1, 1], Sampling(1), pooling=Pooling())
LEAST_FILLED = 0.75
"""The least share of an iteration's tokens that its prompts would have as well if each were computed alone."""


def next_batch(waiting: Sequence[Submit], max_tokens: int, padded: Callable[[int], int]) -> list[Submit]:
    """Choose the requests of the next iteration, at least one, from those that wait in the order of their arrival.

    A prompt alone has `padded(its length)` tokens. In an iteration each prompt has those of the longest one, at most
    `max_tokens` together.
    """
    by_length = sorted(waiting, key=lambda request: len(request.prompt_ids))
    lengths = [padded(len(request.prompt_ids)) for request in by_length]
    begin = by_length.index(waiting[0])
    end, tokens, own = begin + 1, lengths[begin], lengths[begin]
    while begin or end < len(lengths):
        down = own - lengths[begin - 1] if begin else None
        up = lengths[end] - own if end < len(lengths) else None
        shorter = up is None or (down is not None and down < up)
        added = lengths[begin - 1] if shorter else lengths[end]
        computed = (end - begin + 1) * max(added, lengths[end - 1])
        if computed > max_tokens or tokens + added < LEAST_FILLED * computed:
            break
        tokens += added
        begin, end = (begin - 1, end) if shorter else (begin, end + 1)
    return by_length[begin:end]


class PoolingExecutor(ABC):
    """See `djl_trtllm.executor.process.Executor`. A derived class computes.

    `activates`: whether the task's activation (vectors of length 1, a sigmoid of the score) is applied for requests
    that do not say. `dimensions` of a vector are those of a first request's, unless the engine says them.
    """

    features: frozenset[str] = frozenset()

    def __init__(
        self,
        *,
        task: TaskName,
        activates: bool,
        dimensions: int | None = None,
        max_sequences: int,
        max_seq_len: int,
        max_num_tokens: int,
    ) -> None:
        self.limits = Limits(
            max_sequences,
            kv_blocks=0,
            block_size=1,
            max_seq_len=max_seq_len,
            task=task,
            dimensions=self.compute([_FIRST]).shape[1] if dimensions is None else dimensions,
        )
        self.details: dict[str, Any] = {}
        self._activates = activates
        self._max_tokens = max_num_tokens
        self._waiting: dict[int, Submit] = {}
        self._cancelled: list[int] = []

    @abstractmethod
    def compute(self, batch: Sequence[Submit]) -> Vectors:
        """The vectors of some prompts before the activation; a score is a vector of one number.

        An exception means that the engine is lost.
        """

    def padded(self, tokens: int) -> int:
        """The length, in tokens, to which a prompt is padded."""
        return tokens

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._cancelled)

    def submit(self, request: Submit) -> None:
        self._waiting[request.request_id] = request

    def cancel(self, request_id: int) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._cancelled.append(request_id)

    def step(self) -> Step:
        step = Step()
        for request_id in self._cancelled:
            step.end(request_id, FinishReason.CANCELLED)
        self._cancelled.clear()
        if self._waiting:
            batch = next_batch(list(self._waiting.values()), self._max_tokens, self.padded)
            for request, vector in zip(batch, self.compute(batch), strict=True):
                del self._waiting[request.request_id]
                if np.isfinite(vector).all():
                    step.vectors[request.request_id] = self._activated(request, vector).tobytes()
                    step.end(request.request_id, FinishReason.LENGTH)
                else:
                    step.end(request.request_id, FinishReason.ERROR, "the model's output is not finite")
        return step

    def stats(self) -> Stats:
        return Stats(running=len(self._waiting))

    def _activated(self, request: Submit, vector: Vectors) -> Vectors:
        pooling = request.pooling
        assert pooling is not None
        activates = self._activates if pooling.activate is None else pooling.activate
        vector = np.asarray(vector[: pooling.dimensions], np.float32)
        if not activates:
            return vector
        if self.limits.task == "score":
            return np.asarray(0.5 * (1 + np.tanh(0.5 * vector)), np.float32)  # a sigmoid that overflows nowhere
        length = np.linalg.norm(vector)
        return np.asarray(vector / length, np.float32) if length else vector
