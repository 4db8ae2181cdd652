"""The rolling batch: admission, the waiting queue, and the output of the executor's iterations."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from djl_trtllm.batching.clients import Clients
from djl_trtllm.batching.limits import BatchLimits, SequenceLimits
from djl_trtllm.batching.moving import to_move
from djl_trtllm.batching.places import ExecutorPort, Places
from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.request_state import RequestState
from djl_trtllm.batching.slot import Slot, states_of
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.batching.translation import Translator
from djl_trtllm.batching.waiting_queue import WaitingQueue
from djl_trtllm.errors import (
    InvalidRequestError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from djl_trtllm.executor.protocol import Delta, Stats, Step
from djl_trtllm.logs import of_request
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, Consumer, FinishReason, GenerationRequest, Origin

logger = logging.getLogger(__name__)

_UNKNOWN = Origin()


class Loss(NamedTuple):
    """What became of the requests in an engine process that is gone. `blamed`: some have lost too many to go on."""

    resumed: int
    ended: int
    blamed: bool


class RollingBatch:
    """The requests of a model, in one engine process after the other.

    `admit` reserves room before any work is done for a request, `submit` uses it (or `withdraw` gives it back). A
    sequence ends for its consumer in `_deliver`. Its slot and KV cache blocks are free again in `_receive`, on the
    executor's terminal delta.

    Sequences start in the executor of the last `attach`; while there is none they wait. After `lose` those that ran in
    the lost one wait too, before all others, and go on where they were.
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
        self._tokenizer = tokenizer
        self._clock = clock
        self._clients = Clients(clock)
        self._waiting = WaitingQueue()
        self._running: dict[int, Slot] = {}
        self._moving: set[int] = set()
        """Those that are being cancelled because another client needs their places."""
        self._admitted = 0
        self._next_id = 0
        self.attach(executor)

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

    def running_in(self, executor: ExecutorPort) -> int:
        """Sequences that the executor has not ended."""
        return sum(slot.runs_in(executor) for slot in self._running.values())

    @property
    def submitted(self) -> int:
        """Requests that the present executor has had."""
        return 0 if self._places is None else self._places.submitted

    # -- engine processes ------------------------------------------------------------------------------------------

    def attach(self, executor: ExecutorPort) -> None:
        """Start sequences in this executor from now on; those in another one end there."""
        limits = executor.limits
        self.block_size = limits.block_size
        """Tokens in a KV cache block."""
        blocks = limits.kv_blocks
        # What is known of an engine that has not run yet.
        self.engine_stats = Stats(kv_usage=0.0, kv_blocks=blocks, kv_blocks_used=0) if blocks else Stats()
        self._max_running = self.limits.max_batch_size + limits.lookahead
        self._places: Places | None = Places(executor, self.limits.max_batch_size, limits.lookahead)
        self._sequence_limits = SequenceLimits(self.limits, limits)
        self._translator = Translator(self._tokenizer, limits.stops, seeded=limits.seeded)
        self._schedule()

    def hold(self) -> None:
        """Start no sequence until the next `attach`; those that run end where they are."""
        self._places = None

    def lose(self, executor: ExecutorPort, error: RequestError) -> Loss:
        """The executor is gone, with its KV cache: what ran in it goes on in another one, or ends with `error`."""
        if self._places is not None and self._places.executor is executor:
            self.hold()
        self.engine_stats = Stats()
        lost: dict[int, Slot] = {}
        for request_id, slot in list(self._running.items()):
            if slot.runs_in(executor):
                self._leave(request_id, slot)
                if slot.complete:
                    self._end(slot, FinishReason.LENGTH, None)  # only the news of its end is missing
                if slot.sequence.finished is None:
                    lost[request_id] = slot
                else:
                    self._release(slot)
        self._waiting.resume(lost)
        stuck = {id(slot.state) for slot in lost.values() if not slot.can_go_on(executor.limits)}
        states = states_of(lost)
        ended, blamed = 0, False
        for state in states:
            exhausted = state.record.resumes >= self.limits.max_resumes
            if exhausted or id(state) in stuck:
                ended += 1
                blamed = blamed or (exhausted and state.record.resumes > 0)
                self._abort(state, FinishReason.ERROR, error)
            else:
                self.statistics.request_resumed(state.record)
        self._schedule()
        return Loss(len(states) - ended, ended, blamed)

    # -- the way in ------------------------------------------------------------------------------------------------

    def admit(self, sequences: int, key: str = "") -> None:
        """Reserve room for a request of a client. Raises OverloadedError if the queue is full.

        A queue that others have filled has room for the client's share of it.

        Raises InvalidRequestError for more sequences than the batch and its queue hold.
        """
        capacity = self.limits.max_batch_size + self.limits.max_queue_size
        if sequences > capacity:
            raise InvalidRequestError(
                f"the request asks for {sequences} sequences, and there is room for {capacity}: batch and queue "
                f"together (option.max_rolling_batch_size={self.limits.max_batch_size}, "
                f"job_queue_size={self.limits.max_queue_size})"
            )
        client = self._clients.find(key)
        if self._admitted + sequences > capacity and not self._clients.has_share(client, sequences, capacity):
            raise OverloadedError(
                f"the request queue is full: {self.waiting} waiting, job_queue_size is {self.limits.max_queue_size}",
                queue_depth=self.waiting,
                capacity=self.limits.max_queue_size,
                retry_after=self._retry_after(),
            )
        self._admitted += sequences
        self._clients.admit(client, sequences)

    def withdraw(self, sequences: int, key: str = "") -> None:
        """Give back what `admit` reserved: the request will not be submitted."""
        self._admitted -= sequences
        self._clients.release(self._clients.find(key), sequences)

    def fit(self, request: GenerationRequest, prompt_ids: list[int]) -> list[int]:
        """The prompt of an admitted request as `submit` will take it. Raises InvalidRequestError if it cannot run."""
        return self._sequence_limits.fit(request, prompt_ids)[0]

    def learn_stops(self, request: GenerationRequest) -> None:
        """Tokenise the stop strings of a request, so that `submit` does not have to. May run in another thread."""
        self._translator.learn_stops(request)

    def submit(
        self,
        request: GenerationRequest,
        prompt_ids: list[int],
        consumer: Consumer,
        adapter: Adapter | None = None,
        origin: Origin = _UNKNOWN,
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
            self.withdraw(count, origin.client)
            raise
        # As a list, a prompt takes nine times as much memory, as long as its request waits or runs.
        kept_ids = array("i", prompt_ids)
        sequences = self._translator.sequences(request, kept_ids)
        record = RequestRecord(origin, self._clock(), len(prompt_ids), count, request.adapter)
        state = RequestState(request.sampling, sequences, consumer, record)
        blocks = self._sequence_limits.blocks(len(prompt_ids), max_new_tokens)
        client = self._clients.find(origin.client)
        # A seed would give other tokens afterwards.
        movable = request.sampling.seed is None or not request.sampling.do_sample
        for sequence in sequences:
            if sequence.index % beams == 0:
                message = self._translator.message(
                    self._next_id, request, kept_ids, max_new_tokens, sequence.seed, adapter, origin.request_id
                )
            slot = Slot(state, sequence, message, blocks, client, origin.priority, movable)
            self._waiting.add(self._next_id, slot)
            state.ids.append(self._next_id)
            self._next_id += 1
        self.statistics.request_queued(record)
        self._schedule()
        return state

    # -- the way out -----------------------------------------------------------------------------------------------

    def process(self, steps: Sequence[Step]) -> None:
        """Process the executor's iterations: each consumer gets one chunk per sequence, then freed slots are filled."""
        touched: dict[int, Slot] = {}
        running = len(self._running)
        for step in steps:
            for delta in step.deltas:
                slot = self._running.get(delta.request_id)
                if slot is not None:
                    touched[delta.request_id] = slot
                    self._receive(slot, delta)
        if steps:
            self.engine_stats = steps[-1].stats
        self.statistics.tokens_generated(touched.values(), self._clock())
        for slot in touched.values():
            self._deliver(slot)
        if len(self._running) < running:  # nothing else makes room, and looking takes longer the more clients wait
            self._schedule()

    def cancel(self, state: RequestState) -> None:
        """End a request whose client has disconnected."""
        self._abort(state, FinishReason.CANCELLED, None)
        self._schedule()

    def expire(self, timeout: float) -> None:
        """End the requests that arrived more than `timeout` seconds ago. To be called several times a second."""
        oldest = self._clock() - timeout
        late = {
            id(slot.state): slot.state
            for slot in (*self._waiting.values(), *self._running.values())
            if slot.state.record.arrived < oldest and not slot.state.done
        }
        for state in late.values():
            error = RequestTimeoutError(f"the request did not finish within predict_timeout={timeout:g} seconds")
            self._abort(state, FinishReason.ERROR, error)
        self._schedule()  # also, a place that was kept for another client may be free by now

    def fail(self, error: RequestError) -> None:
        """End every request: there will be no other executor."""
        self.hold()
        slots = [*self._running.values(), *self._waiting.values()]
        self._running.clear()
        self._waiting.clear()
        self._moving.clear()
        self.engine_stats = Stats()
        for slot in slots:
            if slot.places is not None:
                slot.leave()
            self._release(slot)
            self._end(slot, FinishReason.ERROR, error)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Move waiting sequences into the executor while it has places and KV cache blocks for them."""
        places = self._places
        if places is None or not self._waiting:
            return
        crowded = self._clients.crowded
        while (request_id := self._waiting.next(places, crowded)) is not None:
            for beam_id, slot in enumerate(self._waiting.take(request_id), request_id):
                self._running[beam_id] = slot
                slot.enter(places)
            self._waiting.place(slot.client)
            self.statistics.request_started(slot.state.record, self._clock())
            places.submitted += 1
            places.executor.submit(slot.start())
        if self._waiting.starving is not None and not self._moving:
            for request_id, slot in to_move(self._running, self._waiting.starving, places, len(self._clients)).items():
                slot.moves += 1
                self._moving.add(request_id)
                self._cancel(request_id, slot)

    def _leave(self, request_id: int, slot: Slot) -> None:
        """The sequence is in no executor any more."""
        del self._running[request_id]
        self._moving.discard(request_id)
        slot.leave()
        self._waiting.place(slot.client)

    def _release(self, slot: Slot) -> None:
        """The sequence is over."""
        self._admitted -= 1
        self._clients.release(slot.client)

    def _receive(self, slot: Slot, delta: Delta) -> None:
        """Process one iteration's delta of a sequence; the terminal delta frees its slot."""
        sequence, finish = slot.sequence, delta.finish
        if delta.cached_tokens and slot.begins:
            self.statistics.prompt_reused(slot.state.record, delta.cached_tokens)
        if sequence.finished is None:
            if not sequence.take(delta.token_ids, delta.logprobs):
                if not finish:
                    self._cancel(delta.request_id, slot)
            elif finish:
                self._finish(slot, delta)
        if finish:
            self._leave(delta.request_id, slot)
            if sequence.finished is None:
                self._waiting.put_back(delta.request_id, slot)
            else:
                self._release(slot)

    def _finish(self, slot: Slot, delta: Delta) -> None:
        """The executor has ended a sequence. One that gave its place away goes on, if it has not all its tokens."""
        if delta.finish is not FinishReason.CANCELLED or delta.request_id not in self._moving:
            slot.sequence.finish(*self._translator.ending(delta))
        elif slot.complete:
            slot.sequence.finish(FinishReason.LENGTH)

    def _abort(self, state: RequestState, reason: FinishReason, error: RequestError | None) -> None:
        for request_id in state.ids:
            slot = self._waiting.remove(request_id)
            if slot is not None:
                self._release(slot)
            else:
                slot = self._running.get(request_id)
                if slot is None or slot.sequence.finished is not None:
                    continue
                self._cancel(request_id, slot)
            self._end(slot, reason, error)

    def _cancel(self, request_id: int, slot: Slot) -> None:
        assert slot.places is not None
        slot.places.executor.cancel(request_id)

    def _end(self, slot: Slot, reason: FinishReason, error: RequestError | None) -> None:
        if slot.sequence.finished is None:
            slot.sequence.finish(reason, error)
            self._deliver(slot)

    def _deliver(self, slot: Slot) -> None:
        """Give a sequence's new output to its consumer."""
        state, sequence = slot.state, slot.sequence
        if sequence.closed:
            return  # the executor has not ended it yet
        result = sequence.finished
        try:
            state.deliver(sequence)
        except Exception:
            # One broken consumer must not stop the others' tokens.
            logger.exception(
                "a request's consumer failed; the request is cancelled",
                extra=of_request(state.record.origin.request_id),
            )
            state.abandon()
            self._abort(state, FinishReason.CANCELLED, None)
        if result is None:
            return
        self.statistics.sequence_ended(result)
        if state.done and state.record.ended is None:
            self.statistics.request_ended(state.record, state.result, self._clock())

    def _retry_after(self) -> int:
        """Seconds until the present queue is probably empty, 1 to 30."""
        times = self.statistics.request_time
        finished = times.count
        mean = times.sum / finished if finished else 1.0
        return max(1, min(30, math.ceil(mean * self.waiting / self.limits.max_batch_size)))
