"""The rolling batch: from a request's admission to its last chunk, in one engine process after the other.

A sequence goes on in another engine process with its prompt and the tokens it has so far as the new prompt. A client
that is alone may take all places. When another client comes and none of its sequences runs, the first gives some places
back: its sequences are cancelled in the executor and go on later, as after the loss of an engine process.
"""

import logging
import math
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter

from msgspec.structs import replace

from djl_trtllm.batching import blame
from djl_trtllm.batching.admission import BatchLimits, SequenceLimits, Translator
from djl_trtllm.batching.blame import Blame, Loss
from djl_trtllm.batching.queue import ClientShares, ExecutorPort, Places, Slot, WaitingQueue
from djl_trtllm.batching.sequence import PooledSequence, RequestState
from djl_trtllm.batching.statistics import RequestRecord, Statistics
from djl_trtllm.errors import (
    GenerationError,
    HarmfulRequestError,
    InvalidRequestError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)
from djl_trtllm.executor.protocol import End, Limits, Stats, Step, Submit, Try
from djl_trtllm.logs import of_request
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import (
    FIELDS,
    Adapter,
    Consumer,
    FinishReason,
    GenerationRequest,
    Image,
    RequestOrigin,
    Resume,
)

logger = logging.getLogger(__name__)

_UNKNOWN = RequestOrigin()
_IMPOSSIBLE = [field for field in FIELDS.values() if field.trait.resume is Resume.IMPOSSIBLE]
_SEED_STEP = 0x9E3779B97F4A7C15
"""An odd number far from 0 modulo 2**64: sequences of one request have neighbouring seeds."""
_MOST_MOVES = 2
"""The most times that a sequence gives its place away."""


def can_resume(message: Submit, generated: int, limits: Limits) -> bool:
    """Whether a sequence with this number of generated tokens can go on in another engine process with these limits.

    One without tokens always can: it begins there. Where the engine `repeats`, its prompt and its least number of
    tokens stay as they were.
    """
    if not generated:
        return True
    if any(field.is_set(message) for field in _IMPOSSIBLE):
        return False
    return limits.repeats or (
        message.sampling.min_new_tokens <= generated
        and len(message.prompt_ids) + generated <= (limits.max_prompt_len or limits.max_seq_len)
    )


def resumed(message: Submit, token_ids: Sequence[int], *, repeats: bool = False) -> Submit:
    """The message that starts a sequence, or lets it go on after the tokens that it has, with its prompt as a list.

    Where the engine `repeats`, it makes the same tokens again, with the same seed. Everywhere else, a seeded sequence
    draws from there on with another seed, which follows from its own and the position: with its own the engine would
    draw the random numbers of its beginning again.
    """
    prompt_ids = [*message.prompt_ids, *token_ids]
    if not token_ids:
        return replace(message, prompt_ids=prompt_ids)
    if repeats:
        return replace(message, prompt_ids=list(message.prompt_ids), repeated_ids=list(token_ids))
    sampling, generated = message.sampling, len(token_ids)
    seed = None if sampling.seed is None else (sampling.seed + generated * _SEED_STEP) % 2**64
    left = replace(sampling, max_new_tokens=sampling.max_new_tokens - generated, min_new_tokens=0, seed=seed)
    return replace(message, prompt_ids=prompt_ids, sampling=left, prompt_logprobs=None)


def to_move(running: Mapping[int, Slot], starving: Slot, places: Places, clients: int) -> dict[int, Slot]:
    """The sequences that give their places to `starving`: the last ones of the client with most places.

    None does if they would not make enough room. A client keeps its share: max_running / `clients` places.
    """
    most = max((slot.client for slot in running.values()), key=lambda client: client.running, default=None)
    if most is None:
        return {}
    available = places.executor.limits.kv_blocks or math.inf
    sequences = places.sequences + starving.beams - places.max_running
    blocks = places.blocks + starving.blocks * starving.beams - available
    left = most.running - max(1, places.max_running // max(1, clients))
    found: dict[int, Slot] = {}
    for request_id in reversed(list(running)):
        if sequences <= 0 and blocks <= 0:
            return found
        slot = running[request_id]
        if len(found) < left and slot.client is most and slot.places is places and _can_move(slot, places):
            found[request_id] = slot
            sequences -= 1
            blocks -= slot.blocks
    return found if sequences <= 0 and blocks <= 0 else {}


def _can_go_on(slot: Slot, limits: Limits) -> bool:
    """Whether a lost sequence can go on in another executor with these limits; beams do so together or not at all."""
    if slot.beams > 1 and any(beam.finished for beam in slot.state.sequences):
        return False
    return can_resume(slot.message, len(slot.sequence.token_ids), limits)


def _can_move(slot: Slot, places: Places) -> bool:
    """Whether a sequence can go on later, however many tokens come before its cancellation takes effect."""
    message, limits, generated = slot.message, places.executor.limits, len(slot.sequence.token_ids)
    return (
        not slot.seeded  # it would have other tokens afterwards
        and slot.moves < _MOST_MOVES
        and slot.sequence.finished is None
        and can_resume(message, max(1, generated), limits)
        and can_resume(message, message.sampling.max_new_tokens, limits)
    )


class RollingBatch:
    """The requests of a model, in one engine process after the other.

    `admit` reserves room before any work is done for a request, `submit` uses it (or `withdraw` gives it back). A
    sequence ends for its consumer in `_deliver`. Its slot and KV cache blocks are free again in `_receive_end`,
    when it has ended in the executor.

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
        self._clients = ClientShares(clock)
        self._waiting = WaitingQueue()
        self._untried: dict[int, Slot] = {}
        """Sequences that wait for the trial of their guide, by id."""
        self._trials: dict[int, RequestState] = {}
        """The requests whose guides are being tried, by the ids of the trials."""
        self._running: dict[int, Slot] = {}
        self._moving: set[int] = set()
        """Ids of the sequences that are being cancelled because another client needs their places."""
        self._admitted = 0
        self._next_id = 0
        self._blame = Blame()
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

    @property
    def searching(self) -> bool:
        """Whether requests are held back because one of them may end engine processes."""
        return self._blame.searching

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
        self.speculates = limits.draft_tokens > 0
        blocks = limits.kv_blocks
        # An engine that has not run yet has an empty KV cache.
        self.engine_stats = Stats(kv_usage=0.0, kv_blocks=blocks, kv_blocks_used=0) if blocks else Stats()
        self._max_running = self.limits.max_batch_size + limits.lookahead
        self._places: Places | None = Places(executor, self.limits.max_batch_size, limits.lookahead)
        self._sequence_limits = SequenceLimits(self.limits, limits)
        self._translator = Translator(
            self._tokenizer,
            limits.stops,
            stops_ignored=limits.stops_ignored,
            seeded=limits.seeded,
            draws_seeds=limits.draws_seeds,
        )
        for trial, state in list(self._trials.items()):
            self._try_guide(trial, state)
        self._schedule()
        self._search()

    def hold(self) -> None:
        """Start no sequence until the next `attach`; those that run end where they are."""
        self._places = None

    def lose(self, executor: ExecutorPort, error: RequestError) -> Loss:
        """Detach a lost executor and its KV cache: its sequences go on in another one, or end with `error`."""
        proved = False
        if self._places is not None and self._places.executor is executor:
            proved = self._places.proved
            self.hold()
        self.engine_stats = Stats()
        lost: dict[int, Slot] = {}
        tokens: dict[str, int] = {}
        for request_id, slot in list(self._running.items()):
            if slot.runs_in(executor):
                got = slot.got
                self._leave(request_id, slot)
                if slot.complete:
                    self._end(slot, FinishReason.LENGTH, None)  # only the news of its end is missing
                if slot.sequence.finished is None:
                    lost[request_id] = slot
                    key = self._digest(slot)
                    tokens[key] = min(got, tokens.get(key, got))
                else:
                    self._release(slot)
        self._waiting.resume(lost)
        proved = proved or any(count >= blame.PASSED for count in tokens.values())
        guilty = self._blame.lost(tokens, self._clock(), proved=proved)
        if guilty is not None:
            self._end_guilty(guilty.key)
        states = {id(slot.state): slot.state for slot in lost.values()}
        stuck = {id(slot.state) for slot in lost.values() if not _can_go_on(slot, executor.limits)}
        ended = 0
        for id_, state in states.items():
            if state.done:
                ended += 1
            elif not self.limits.resume or id_ in stuck:
                ended += 1
                self._abort(state, FinishReason.ERROR, error)
            else:
                self.statistics.request_resumed(state.record)
        for request_id, slot in list(self._waiting.resumed.items()):
            if not self._blame.runs(slot.state.digest):
                self._waiting.remove(request_id)
                self._waiting.hold(request_id, slot)
        self._search()
        return Loss(len(states) - ended, ended, proved, guilty)

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

    def fit(self, request: GenerationRequest, prompt_ids: Sequence[int]) -> Sequence[int]:
        """The prompt of an admitted request as `submit` will take it. Raises InvalidRequestError if it cannot run."""
        return self._sequence_limits.fit(request, prompt_ids)[0]

    def learn_stops(self, request: GenerationRequest) -> None:
        """Tokenise the stop strings of a request, so that `submit` does not have to. May run in another thread."""
        self._translator.learn_stops(request)

    def submit(
        self,
        request: GenerationRequest,
        prompt_ids: Sequence[int],
        consumer: Consumer,
        adapter: Adapter | None = None,
        origin: RequestOrigin = _UNKNOWN,
        images: tuple[Image, ...] = (),
    ) -> RequestState:
        """Queue an admitted request, `adapter` being the one it names, `images` those of its prompt.

        If it can never run, or ends engine processes, gives its reservation back and raises InvalidRequestError.
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
        kept_ids = prompt_ids if isinstance(prompt_ids, array) else array("i", prompt_ids)
        most = min(max_new_tokens, self._sequence_limits.longest_prompt - len(prompt_ids))
        sequences = self._translator.sequences(request, kept_ids, most)
        record = RequestRecord(
            origin,
            self._clock(),
            len(prompt_ids),
            count,
            request.adapter,
            images=len(images),
            image_tokens=sum(map(attrgetter("tokens"), images)),
            image_bytes=sum(map(len, map(attrgetter("data"), images))),
        )
        state = RequestState(request.sampling, sequences, consumer, record)
        blocks = self._sequence_limits.blocks(len(prompt_ids), max_new_tokens)
        client = self._clients.find(origin.client)
        seeded = request.sampling.seed is not None and request.sampling.do_sample
        for sequence in sequences:
            if sequence.index % beams == 0:
                message = self._translator.message(
                    self._next_id, request, kept_ids, max_new_tokens, sequence.seed, adapter, origin, images
                )
            if sequence.index:
                message = replace(message, prompt_logprobs=None)
            slot = Slot(state, sequence, message, blocks, client, request.priority or origin.priority, seeded)
            if self._blame.remembers and not state.ids:
                self._check_innocent(slot)
            self._untried[self._next_id] = slot
            state.ids.append(self._next_id)
            self._next_id += 1
        self.statistics.request_queued(record)
        if request.guide is None:
            self._let_wait(state)
        else:
            self._try_guide(self._next_id, state)
            self._next_id += 1
        if self._waiting:
            self._search()
        return state

    # -- the way out -----------------------------------------------------------------------------------------------

    def process(self, steps: Sequence[Step]) -> None:
        """Process the executor's iterations: each consumer gets one chunk per sequence, then freed slots are filled."""
        touched: dict[int, Slot] = {}
        running, trials = len(self._running), len(self._trials)
        for step in steps:
            self._receive(step, touched)
        if steps:
            self.engine_stats = steps[-1].stats
        if self._places is not None:
            self._places.steps += len(steps)
        outputs = [(slot.state.record, slot.sequence) for slot in touched.values()]
        self.statistics.tokens_generated(outputs, self._clock())
        for slot in touched.values():
            self._deliver(slot)
        if self.searching:
            self._search()
        # Nothing else makes room or lets sequences wait, and looking takes longer the more clients wait.
        elif len(self._running) < running or len(self._trials) < trials:
            self._schedule()

    def cancel(self, *states: RequestState) -> None:
        """End the requests of a client that has disconnected; nothing starts in their places before all have ended."""
        for state in states:
            self._abort(state, FinishReason.CANCELLED, None)
        self._search()

    def expire(self, timeout: float) -> None:
        """End the requests that arrived more than `timeout` seconds ago. To be called several times a second."""
        oldest = self._clock() - timeout
        late = {
            id(slot.state): slot.state
            for slot in (*self._untried.values(), *self._waiting.values(), *self._running.values())
            if slot.state.record.arrived < oldest and not slot.state.done
        }
        for state in late.values():
            error = RequestTimeoutError(f"the request did not finish within predict_timeout={timeout:g} seconds")
            self._abort(state, FinishReason.ERROR, error)
        self._search()  # also, a place that was kept for another client may be free by now

    def fail(self, error: RequestError) -> None:
        """End every request: there will be no other executor."""
        self.hold()
        slots = [*self._running.values(), *self._waiting.values(), *self._untried.values()]
        self._untried.clear()
        self._trials.clear()
        self._running.clear()
        self._waiting.clear()
        self._moving.clear()
        self._blame.stop()
        self.engine_stats = Stats()
        for slot in slots:
            if slot.places is not None:
                slot.leave()
            self._release(slot)
            self._end(slot, FinishReason.ERROR, error)

    # -- requests that end engine processes ------------------------------------------------------------------------

    def _digest(self, slot: Slot) -> str:
        state = slot.state
        if not state.digest:
            state.digest = blame.digest(slot.message)
        return state.digest

    def _check_innocent(self, slot: Slot) -> None:
        """Give the reservation of a guilty request back, and raise HarmfulRequestError."""
        key = self._digest(slot)
        if seconds := self._blame.refused_for(key, self._clock()):
            self.withdraw(len(slot.state.sequences), slot.client.key)
            raise HarmfulRequestError(
                f"the request {key} ends the engine: {blame.LOSSES} engine processes were lost when it began to run. "
                f"The same input with the same parameters is refused for {math.ceil(seconds)} more seconds; change it"
            )

    def _end_guilty(self, key: str) -> None:
        error = GenerationError(
            f"the request {key} ends the engine: {blame.LOSSES} engine processes in a row were lost while it began, "
            f"and everything else goes on without it; it is refused for {blame.REFUSED_SECONDS / 60:g} minutes"
        )
        for slot in (*self._untried.values(), *self._waiting.values(), *self._running.values()):
            if self._digest(slot) == key and not slot.state.done:
                self._abort(slot.state, FinishReason.ERROR, error)

    def _search(self) -> None:
        """Let the next suspects go when all that runs has passed, and start what may start."""
        held = self._waiting.held
        if self._places is not None and (self.searching or held):
            tokens: dict[str, int] = {}
            for slot in (*self._running.values(), *self._waiting.resumed.values()):
                if slot.sequence.finished is None and (key := slot.state.digest):
                    tokens[key] = min(slot.got, tokens.get(key, slot.got))
            waiting = {slot.state.digest for slot in held.values()}
            released = self._blame.advance(tokens, waiting, self._places.steps)
            everything = not self.searching
            self._waiting.release(
                [request_id for request_id, slot in held.items() if everything or slot.state.digest in released]
            )
        self._schedule()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _try_guide(self, trial: int, state: RequestState) -> None:
        """Let the executor try a request's guide, or let the request wait where the executor does not do that."""
        self._trials[trial] = state
        if self._places is None:
            return
        executor, message = self._places.executor, self._untried[state.ids[0]].message
        assert message.guide is not None
        if executor.limits.tries_guides:
            executor.try_guide(Try(trial, message.guide, message.origin, message.client))
        else:
            self._let_wait(self._trials.pop(trial))

    def _end_trial(self, end: End) -> None:
        """The executor has tried the guide of a request, whose client still waits."""
        state = self._trials.pop(end.request_id)
        if end.error is None:
            # Other trials may have ended in the same iteration: `_schedule` chooses among their clients.
            self._let_wait(state, at_once=False)
        else:
            self._abort(state, *self._translator.ending(end, None))

    def _let_wait(self, state: RequestState, *, at_once: bool = True) -> None:
        """Queue the sequences of a request, or start them `at_once` if none wait; those of a suspect are held back."""
        places, slot = self._places, self._untried[state.ids[0]]
        first = at_once and slot.beams == len(state.ids) and self._blame.is_idle and not self._waiting
        if first and places is not None and places.has_room(slot, crowded=self._clients.crowded):
            self._waiting.skip(slot)
            self._start(places, {request_id: self._untried.pop(request_id) for request_id in state.ids})
            return
        digest = self._digest(slot) if self._blame.remembers else ""
        wait = self._waiting.hold if digest and self._blame.suspect(digest, self._clock()) else self._waiting.add
        for request_id in state.ids:
            wait(request_id, self._untried.pop(request_id))

    def _schedule(self) -> None:
        """Move waiting sequences into the executor while it has places and KV cache blocks for them."""
        places = self._places
        if places is None or not self._waiting:
            return
        crowded = self._clients.crowded
        while (request_id := self._waiting.next(places, crowded, resumed_only=not self._blame.is_open)) is not None:
            taken = dict(enumerate(self._waiting.take(request_id), request_id))
            slot = taken[request_id]
            if self.searching and not self._blame.join(self._digest(slot)):
                for beam_id, beam in taken.items():
                    self._waiting.hold(beam_id, beam)
                continue
            self._start(places, taken)
            self._waiting.place(slot.client)
        if self._waiting.starving is not None and not self._moving:
            for request_id, slot in to_move(self._running, self._waiting.starving, places, len(self._clients)).items():
                slot.moves += 1
                self._moving.add(request_id)
                self._cancel(request_id, slot)

    def _start(self, places: Places, beams: dict[int, Slot]) -> None:
        """Start a sequence, or the beams of one, in the executor."""
        for request_id, slot in beams.items():
            self._running[request_id] = slot
            elsewhere = bool(slot.sequence.token_ids) and not slot.sequence.stale
            slot.enter(places)
        record, repeats = slot.state.record, places.executor.limits.repeats
        # Where reasoning is ended, it is at the same token with the same seed.
        record.reseeded |= elsewhere and slot.seeded and not repeats
        self.statistics.request_started(record, self._clock())
        places.submitted += 1
        message = resumed(slot.message, slot.sequence.token_ids, repeats=repeats)
        places.executor.submit(replace(message, prompt_logprobs=None) if slot.state.scored else message)

    def _leave(self, request_id: int, slot: Slot) -> None:
        """Note that the sequence is in no executor any more."""
        del self._running[request_id]
        self._moving.discard(request_id)
        slot.leave()
        self._waiting.place(slot.client)

    def _release(self, slot: Slot) -> None:
        """Give back the reservation of a sequence that is over."""
        self._admitted -= 1
        self._clients.release(slot.client)

    def _receive(self, step: Step, touched: dict[int, Slot]) -> None:
        """Give each sequence its tokens, end those that have ended, and note the slots of both."""
        running, complete = self._running, []
        if step.prompts:
            self._receive_prompts(step, touched)
        ids = step.ids if not step.counts else chain.from_iterable(map(repeat, step.ids, step.counts))
        for request_id, token_id, logprob in zip(ids, step.tokens, step.logprobs or repeat(None), strict=False):
            slot = running.get(request_id)
            if slot is None:
                continue
            touched[request_id] = slot
            if slot.sequence.finished is not None or slot.sequence.stale:
                slot.sequence.dropped += 1
            elif not slot.sequence.take(token_id, logprob):
                complete.append(request_id)
        self._count(step)
        for end in step.ends:
            if (slot := running.get(end.request_id)) is not None:
                touched[end.request_id] = slot
                self._receive_end(slot, end)
            elif end.request_id in self._trials:
                self._end_trial(end)
        for request_id in complete:
            if (slot := running.get(request_id)) is not None:
                self._cancel(request_id, slot)

    def _receive_prompts(self, step: Step, touched: dict[int, Slot]) -> None:
        """Give requests the log-probabilities of their prompts."""
        for request_id, scores in step.prompts.items():
            slot = self._running.get(request_id)
            if slot is None or slot.state.scored:
                continue
            state, prompt_ids = slot.state, slot.sequence.prompt_ids
            if len(scores) == len(prompt_ids):
                state.prompt, state.scored = self._translator.prompt(prompt_ids, scores), True
                touched[request_id] = slot
            else:
                problem = f"the engine gave {len(scores)} log-probabilities for {len(prompt_ids)} tokens of the prompt"
                self._abort(state, FinishReason.ERROR, GenerationError(problem))

    def _count(self, step: Step) -> None:
        """Take vectors, and count tokens of a step that the engine did not compute one by one."""
        for request_id, vector in step.vectors.items():
            if (slot := self._running.get(request_id)) is not None and isinstance(slot.sequence, PooledSequence):
                slot.sequence.vector = vector
        for request_id, tokens in step.cached.items():
            if (slot := self._running.get(request_id)) is not None and slot.begins:
                slot.sequence.cached_tokens = tokens
                self.statistics.prompt_reused(slot.state.record, tokens)
        for request_id, tokens in step.accepted.items():
            if (slot := self._running.get(request_id)) is not None:
                # What is dropped behind a stop string ends with a token of the model's own.
                sequence = slot.sequence
                kept, sequence.dropped = max(0, tokens - max(0, sequence.dropped - 1)), 0
                sequence.accepted = (sequence.accepted or 0) + kept
                self.statistics.tokens_accepted(slot.state.record, kept)

    def _receive_end(self, slot: Slot, end: End) -> None:
        """The executor has ended a sequence, so its slot is free.

        A sequence that gave its place away goes on later. A sequence whose reasoning was ended goes on at once.
        """
        sequence, request_id = slot.sequence, end.request_id
        moved = end.finish is FinishReason.CANCELLED and request_id in self._moving
        if sequence.finished is None:
            if not moved and (end.error is not None or not sequence.stale):
                if slot.begins:
                    sequence.drafted = end.drafted
                last_token = sequence.token_ids[-1] if sequence.token_ids else None
                sequence.finish(*self._translator.ending(end, last_token))
            elif slot.complete:
                sequence.finish(FinishReason.LENGTH)
        if sequence.finished is not None and sequence.finished.reason <= FinishReason.LENGTH:
            self._blame.ended(slot.state.digest)
            assert slot.places is not None
            slot.places.proved = True
        self._leave(request_id, slot)
        if sequence.finished is not None:
            self._release(slot)
        elif sequence.stale and not moved:
            self._waiting.resume({request_id: slot})
        else:
            self._waiting.put_back(request_id, slot)

    def _abort(self, state: RequestState, reason: FinishReason, error: RequestError | None) -> None:
        for trial in [trial for trial, tried in self._trials.items() if tried is state]:
            del self._trials[trial]
            if self._places is not None:
                self._places.executor.cancel(trial)
        for request_id in state.ids:
            slot = self._untried.pop(request_id, None) or self._waiting.remove(request_id)
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
