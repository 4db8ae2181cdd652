"""One request in the rolling batch: its sequences, and how their output reaches its consumer."""

from __future__ import annotations

from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.request import Consumer, FinishReason, OutputChunk, Sampling, Token

_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.ERROR)


class RequestState:
    """What `RollingBatch.submit` returns.

    Its consumer gets each sequence's chunks in order. The last one of each has its `SequenceResult`, however it ended.
    With `best_of` or beams, everything is delivered at the end, the best sequences first.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt_tokens: int,
        sequences: list[OutputSequence],
        consumer: Consumer,
        arrived: float,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.sequences = sequences
        self.ids: list[int] = []
        """The executor's ids of the sequences."""
        self.arrived = arrived
        """Seconds on the rolling batch's clock, like the next two."""
        self.started: float | None = None
        self.last_token_at: float | None = None
        self.resumes = 0
        """How often it went on in a new engine process."""
        self._consumer = consumer
        self._beams = sampling.beam_width > 1
        self._ranked = sampling.n if sampling.best_of is not None or self._beams else None
        self._unfinished = len(sequences)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self._unfinished

    def deliver(self, sequence: OutputSequence) -> list[Token]:
        """Give the consumer the new output of a sequence that is not closed.

        Returns the new tokens, none while ranking holds them back.
        """
        if sequence.finished is not None:
            if self.started is not None:
                sequence.finished = sequence.finished._replace(queue_seconds=self.started - self.arrived)
            sequence.closed = True
            self._unfinished -= 1
        if self._ranked is not None:
            return self._deliver_ranked(self._ranked) if self.done else []
        chunk = sequence.drain()
        if chunk.tokens or chunk.finished is not None:
            self._consumer(chunk)
        return chunk.tokens

    def abandon(self) -> None:
        self._consumer = _ignore

    def _deliver_ranked(self, n: int) -> list[Token]:
        # The engine gives beams in their order.
        best = self.sequences if self._beams else sorted(self.sequences, key=_rank, reverse=True)
        tokens: list[Token] = []
        for index, sequence in enumerate(best):
            sequence.index = index
            chunk = sequence.drain()
            tokens += chunk.tokens
            if index < n:
                self._consumer(chunk)
        return tokens


def _rank(sequence: OutputSequence) -> tuple[bool, float]:
    """Ranks a sequence that was cut short below complete ones, although its log-probability is higher."""
    assert sequence.finished is not None
    return sequence.finished.reason not in _CUT_SHORT, sequence.cumulative_logprob


def _ignore(chunk: OutputChunk) -> None:
    pass
