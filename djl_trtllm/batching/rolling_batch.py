"""The rolling batch: admission, the waiting queue, and the output of the executor's iterations."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from djl_trtllm.batching.limits import BatchLimits, SequenceLimits
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.batching.sequence import OutputSequence
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.batching.translation import Translator
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from djl_trtllm.executor.protocol import Delta, Limits, Refusal, Stats, Step, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, Consumer, FinishReason, GenerationRequest

logger = logging.getLogger(__name__)


class ExecutorPort(Protocol):
    """The executor as the rolling batch sees it."""

    @property
    def limits(self) -> Limits:
        """What it can hold."""

    def submit(self, request: Submit) -> None:
        """Start a sequence."""

    def cancel(self, request_id: int) -> None:
        """End a sequence early; its terminal delta comes later."""


@dataclass(slots=True, eq=False)
class _Slot:
    """A sequence in the tables, from `submit` to the executor's terminal delta.

    The beams of a request share one message, and enter the executor together.
    """

    state: RequestState
    sequence: OutputSequence
    message: Submit
    blocks: int


class RollingBatch:
    """The requests of one engine process.

    `admit` reserves room before any work is done for a request, `submit` uses it (or `withdraw` gives it back). A
    sequence ends for its consumer in `_end`. Its slot and KV cache blocks are free again in `_receive`, on the
    executor's terminal delta.
    """

    def __init__(
        self,
        executor: ExecutorPort,
        tokenizer: Tokenizer,
        limits: BatchLimits,
        statistics: Statistics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.statistics = statistics
        self.engine_stats = Stats()
        self._executor = executor
        self._end_ids = tokenizer.end_ids
        self._clock = clock
        self._sequence_limits = SequenceLimits(limits, executor.limits)
        self._translator = Translator(tokenizer, executor.limits.stops, seeded=executor.limits.seeded)
        self._max_running = limits.max_batch_size + executor.limits.lookahead
        self._waiting: dict[int, _Slot] = {}
        self._running: dict[int, _Slot] = {}
        self._admitted = 0
        self._blocks_in_use = 0
        self._next_id = 0

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot, including those being tokenised or queued in the executor."""
        return self._admitted - self.running

    @property
    def running(self) -> int:
        """Sequences that run in the executor; those beyond its capacity wait there."""
        return min(len(self._running), self.limits.max_batch_size)

    @property
    def idle(self) -> bool:
        return not self._admitted

    # -- the way in ------------------------------------------------------------------------------------------------

    def admit(self, sequences: int) -> None:
        """Reserve room for a request. Raises OverloadedError if the queue is full.

        Raises InvalidRequestError for more sequences than the batch and its queue hold.
        """
        capacity = self.limits.max_batch_size + self.limits.max_queue_size
        if sequences > capacity:
            raise InvalidRequestError(
                f"the request asks for {sequences} sequences, and there is room for {capacity}: batch and queue "
                f"together (option.max_rolling_batch_size={self.limits.max_batch_size}, "
                f"job_queue_size={self.limits.max_queue_size})"
            )
        if self._admitted + sequences > capacity:
            raise OverloadedError(
                f"the request queue is full: {self.waiting} waiting, job_queue_size is {self.limits.max_queue_size}",
                queue_depth=self.waiting,
                capacity=self.limits.max_queue_size,
                retry_after=self._retry_after(),
            )
        self._admitted += sequences

    def withdraw(self, sequences: int) -> None:
        """Give back what `admit` reserved: the request will not be submitted."""
        self._admitted -= sequences

    def submit(
        self,
        request: GenerationRequest,
        prompt_ids: list[int],
        consumer: Consumer,
        adapter: Adapter | None = None,
    ) -> RequestState:
        """Queue an admitted request, `adapter` being the one it names.

        If it can never run, gives its reservation back and raises InvalidRequestError.
        """
        count, beams = request.sampling.sequences, request.sampling.beam_width
        try:
            if beams > self._max_running:
                raise InvalidRequestError(
                    f"the request asks for {beams} beams, and {self._max_running} sequences run together "
                    f"(option.max_rolling_batch_size={self.limits.max_batch_size})"
                )
            prompt_ids, max_new_tokens = self._sequence_limits.fit(request, prompt_ids)
        except RequestError:
            self.withdraw(count)
            raise
        sequences = self._translator.sequences(request, prompt_ids)
        state = RequestState(request.sampling, len(prompt_ids), sequences, consumer, self._clock())
        blocks = self._sequence_limits.blocks(len(prompt_ids), max_new_tokens)
        for sequence in sequences:
            if sequence.index % beams == 0:
                message = self._translator.message(
                    self._next_id, request, prompt_ids, max_new_tokens, sequence.seed, adapter
                )
            self._waiting[self._next_id] = _Slot(state, sequence, message, blocks)
            state.ids.append(self._next_id)
            self._next_id += 1
        self.statistics.requests += 1
        self.statistics.prompt_tokens += len(prompt_ids)
        self._schedule()
        return state

    # -- the way out -----------------------------------------------------------------------------------------------

    def process(self, steps: Sequence[Step]) -> None:
        """Process the executor's iterations: each consumer gets one chunk per sequence, then freed slots are filled."""
        touched: dict[int, _Slot] = {}
        for step in steps:
            for delta in step.deltas:
                slot = self._running.get(delta.request_id)
                if slot is not None:
                    touched[delta.request_id] = slot
                    self._receive(slot, delta)
        if steps:
            self.engine_stats = steps[-1].stats
        now = self._clock()
        for slot in touched.values():
            self._deliver(slot, now)
        self._schedule()

    def cancel(self, state: RequestState) -> None:
        """End a request whose client has disconnected."""
        self._abort(state, FinishReason.CANCELLED, None)
        self._schedule()

    def expire(self, timeout: float) -> None:
        """End the requests that arrived more than `timeout` seconds ago."""
        oldest = self._clock() - timeout
        late = {
            id(slot.state): slot.state
            for table in (self._waiting, self._running)
            for slot in table.values()
            if slot.state.arrived < oldest and not slot.state.done
        }
        for state in late.values():
            error = RequestTimeoutError(f"the request did not finish within predict_timeout={timeout:g} seconds")
            self._abort(state, FinishReason.ERROR, error)
        if late:
            self._schedule()

    def fail(self, error: RequestError) -> None:
        """End every request: the executor is gone, with its slots and KV cache."""
        slots = [*self._running.values(), *self._waiting.values()]
        self._running.clear()
        self._waiting.clear()
        self._admitted -= len(slots)
        self._blocks_in_use = 0
        self.engine_stats = Stats()
        for slot in slots:
            self._end(slot, FinishReason.ERROR, error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Move waiting sequences into the executor, in order, while it has places and KV cache blocks for them."""
        available = self._executor.limits.kv_blocks
        while self._waiting:
            request_id, slot = next(iter(self._waiting.items()))
            beams = slot.message.sampling.beam_width
            if len(self._running) + beams > self._max_running:
                break
            if available and self._blocks_in_use + slot.blocks * beams > available:
                break
            for beam_id in range(request_id, request_id + beams):
                self._running[beam_id] = self._waiting.pop(beam_id)
            self._blocks_in_use += slot.blocks * beams
            if slot.state.started is None:
                slot.state.started = self._clock()
                self.statistics.queue_time.observe(slot.state.started - slot.state.arrived)
            self._executor.submit(slot.message)

    def _receive(self, slot: _Slot, delta: Delta) -> None:
        """Process one iteration's delta of a sequence; the terminal delta frees its slot."""
        sequence = slot.sequence
        self.statistics.reused_prompt_tokens += delta.cached_tokens
        if sequence.finished is None:
            if not sequence.take(delta.token_ids, delta.logprobs):
                if not delta.finish:
                    self._executor.cancel(delta.request_id)
            elif delta.finish:
                sequence.finish(self._reason(delta), _error(delta))
        if delta.finish:
            del self._running[delta.request_id]
            self._admitted -= 1
            self._blocks_in_use -= slot.blocks

    def _reason(self, delta: Delta) -> FinishReason:
        """An executor does not distinguish the model's end tokens from other stop ids."""
        assert delta.finish is not None
        if delta.finish in (FinishReason.STOP, FinishReason.END_TOKEN):
            ended_by = delta.token_ids[-1] if delta.token_ids else None
            return FinishReason.END_TOKEN if ended_by in self._end_ids else FinishReason.STOP
        return delta.finish

    def _abort(self, state: RequestState, reason: FinishReason, error: RequestError | None) -> None:
        for request_id in state.ids:
            slot = self._waiting.pop(request_id, None)
            if slot is not None:
                self._admitted -= 1
            else:
                slot = self._running.get(request_id)
                if slot is None or slot.sequence.finished is not None:
                    continue
                self._executor.cancel(request_id)
            self._end(slot, reason, error)

    def _end(self, slot: _Slot, reason: FinishReason, error: RequestError | None) -> None:
        if slot.sequence.finished is None:
            slot.sequence.finish(reason, error)
            self._deliver(slot, self._clock())

    def _deliver(self, slot: _Slot, now: float) -> None:
        """Give a sequence's new output to its consumer, and count it."""
        state, sequence = slot.state, slot.sequence
        if sequence.closed:
            return  # the executor has not ended it yet
        try:
            tokens = state.deliver(sequence)
        except Exception:
            # One broken consumer must not stop the others' tokens.
            logger.exception("a request's consumer failed; the request is cancelled")
            state.abandon()
            self._abort(state, FinishReason.CANCELLED, None)
            return
        self._count(state, sequence, len(tokens), now)

    def _count(self, state: RequestState, sequence: OutputSequence, tokens: int, now: float) -> None:
        statistics = self.statistics
        if tokens:
            statistics.generated_tokens += tokens
            if state.last_token_at is None:
                statistics.time_to_first_token.observe(now - state.arrived)
            else:
                statistics.inter_token_latency.observe((now - state.last_token_at) / tokens, tokens)
            state.last_token_at = now
        if sequence.finished is not None:
            statistics.finished[sequence.finished.reason] += 1
            if state.done:
                statistics.request_time.observe(now - state.arrived)

    def _retry_after(self) -> int:
        """Seconds until the present queue is probably empty, 1 to 30."""
        times = self.statistics.request_time
        finished = sum(times.counts)
        mean = times.sum / finished if finished else 1.0
        return max(1, min(30, math.ceil(mean * self.waiting / self.limits.max_batch_size)))


def _error(delta: Delta) -> RequestError | None:
    if isinstance(delta.error, Refusal):
        return InvalidRequestError(delta.error.message)
    return GenerationError(delta.error) if delta.error else None
