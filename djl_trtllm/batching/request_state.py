"""One request in the rolling batch: its sequences, and how their output reaches its consumer."""

from __future__ import annotations

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.request import Consumer, FinishReason, OutputChunk, Sampling, SequenceResult

_CUT_SHORT = (FinishReason.CANCELLED, FinishReason.ERROR)


class RequestState:
    """What `RollingBatch.submit` returns.

    Its consumer gets each sequence's chunks in order. The last one of each has its `SequenceResult`, however it ended.
    With `best_of` or beams, everything is delivered at the end, the best sequences first.
    """

    def __init__(
        self,
        sampling: Sampling,
        sequences: list[OutputSequence],
        consumer: Consumer,
        record: RequestRecord,
    ) -> None:
        self.sequences = sequences
        self.ids: list[int] = []
        """The executor's ids of the sequences."""
        self.record = record
        self._consumer = consumer
        self._beams = sampling.beam_width > 1
        self._ranked = sampling.n if sampling.best_of is not None or self._beams else None
        self._unfinished = len(sequences)

    @property
    def done(self) -> bool:
        """Whether every sequence has ended."""
        return not self._unfinished

    @property
    def result(self) -> SequenceResult:
        """How the request ended, once it is done: as the sequence that ended worst."""
        return max((each.finished for each in self.sequences if each.finished), key=lambda result: result.reason)

    def deliver(self, sequence: OutputSequence) -> None:
        """Give the consumer the new output of a sequence that is not closed; ranking holds it back to the end."""
        consumer = self._consumer
        if sequence.finished is not None:
            started = self.record.started
            if started is not None:
                sequence.finished = sequence.finished._replace(queue_seconds=started - self.record.arrived)
            sequence.closed = True
            self._unfinished -= 1
            if self.done:
                # It refers to what refers to this request: both would stay until the garbage collector looks at all.
                self.abandon()
        if self._ranked is not None:
            if self.done:
                self._deliver_ranked(consumer, self._ranked)
            return
        chunk = sequence.drain()
        if chunk.tokens or chunk.finished is not None:
            consumer(chunk)

    def abandon(self) -> None:
        self._consumer = _ignore

    def _deliver_ranked(self, consumer: Consumer, n: int) -> None:
        # The engine gives beams in their order.
        best = self.sequences if self._beams else sorted(self.sequences, key=_rank, reverse=True)
        for index, sequence in enumerate(best[:n]):
            sequence.index = index
            consumer(sequence.drain())


def _rank(sequence: OutputSequence) -> tuple[bool, float]:
    """Ranks a sequence that was cut short below complete ones, although its log-probability is higher."""
    assert sequence.finished is not None
    return sequence.finished.reason not in _CUT_SHORT, sequence.cumulative_logprob


def _ignore(chunk: OutputChunk) -> None:
    pass
