"""The order of sequences: clients of a rolling batch, places in an engine process, and the sequences that wait."""

import contextlib
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from djl_trtllm.batching.sequence import OutputSequence, RequestState
from djl_trtllm.executor.protocol import Limits, Submit, Try

_OUTPUT_WEIGHT = 2
"""The weight of an output token in the service: it takes an iteration, while the tokens of a prompt share one."""
_RECENT_SECONDS = 300.0
_MOST_IDLE = 4096
"""Clients without requests whose service is remembered. One that is forgotten is a new one."""
_RESERVE = 16
"""One of this number of places, and of KV cache blocks, is kept free for clients that ask for little."""
_TURNS = 8
_MOST_OVERTAKING = 16
_MOST_BLOCKED = 16
"""The most clients whose first sequences are tried until one fits."""
_STALE = 64
"""The most outdated entries of the heap, beside one entry for each client."""


@dataclass(slots=True, eq=False)
class ClientShare:
    """The part of the batch that a client has: `admitted` sequences wait or run, `running` of these run, in `blocks` of
    the KV cache.

    The client was given `service`, and its running sequences may get `expected` more. Its last request ended at
    `left_at`.
    """

    key: str
    admitted: int = 0
    running: int = 0
    blocks: int = 0
    service: int = 0
    expected: int = 0
    left_at: float = 0.0


class ClientShares:
    """All clients that have requests, and the last ones that had some."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active: dict[str, ClientShare] = {}
        self._idle: OrderedDict[str, ClientShare] = OrderedDict()
        """Clients without requests, the one that left last at the end."""

    def __len__(self) -> int:
        """Return how many clients have requests."""
        return len(self._active)

    def find(self, key: str) -> ClientShare:
        """The share of this client: what it has and had, or an empty one."""
        return self._active.get(key) or self._idle.get(key) or ClientShare(key)

    def admit(self, client: ClientShare, sequences: int) -> None:
        self._active[client.key] = client
        self._idle.pop(client.key, None)
        client.admitted += sequences

    def release(self, client: ClientShare, sequences: int = 1) -> None:
        client.admitted -= sequences
        if not client.admitted:
            del self._active[client.key]
            client.left_at = self._clock()
            self._idle[client.key] = client
            if len(self._idle) > _MOST_IDLE:
                self._idle.popitem(last=False)

    @property
    def crowded(self) -> bool:
        """Whether there are several clients: two have requests, or one has and another had some minutes ago."""
        if len(self._active) > 1:
            return True
        last = next(reversed(self._idle.values()), None)
        return last is not None and last.left_at > self._clock() - _RECENT_SECONDS

    def has_share(self, client: ClientShare, sequences: int, capacity: int) -> bool:
        """Whether a client may have more sequences although others have filled the queue: capacity / clients of them.

        The queue gets longer by that, up to twice its capacity.
        """
        clients = len(self._active) + (client.key not in self._active)
        return clients > 1 and client.admitted + sequences <= capacity // clients


class ExecutorPort(Protocol):
    """The executor as the rolling batch sees it."""

    @property
    def limits(self) -> Limits:
        """The capacity of the executor."""

    def submit(self, request: Submit) -> None:
        """Start a sequence."""

    def try_guide(self, trial: Try) -> None:
        """Begin to try a guide, if its limits say that it does."""

    def cancel(self, request_id: int) -> None:
        """End a sequence early; the executor says so later."""


@dataclass(slots=True, eq=False)
class Places:
    """The places of an executor: `max_running` sequences run, `lookahead` more wait inside it.

    `submitted` counts the messages since its start, `steps` those of the executor. `proved`: a sequence has ended in it
    as it should.
    """

    executor: ExecutorPort
    max_running: int
    lookahead: int = 0
    sequences: int = 0
    blocks: int = 0
    submitted: int = 0
    steps: int = 0
    proved: bool = False
    reserve: int = field(init=False)
    reserved_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        self.reserve = max(1, self.max_running // _RESERVE) if self.max_running > 1 else 0
        self.reserved_blocks = self.executor.limits.kv_blocks // _RESERVE

    @property
    def max_sequences(self) -> int:
        return self.max_running + self.lookahead

    def fit(self, sequences: int, blocks: int) -> bool:
        """Whether there is room for N more sequences, which take this number of KV cache blocks together."""
        available = self.executor.limits.kv_blocks
        if self.sequences + sequences > self.max_sequences:
            return False
        return not available or self.blocks + blocks <= available

    def has_room(self, slot: "Slot", *, crowded: bool) -> bool:
        """Whether a sequence may start, with its beams. `crowded`: there are several clients."""
        sequences = slot.message.sampling.beam_width
        if crowded:
            return self.fit_among_others(slot.client, sequences, slot.blocks * sequences)
        return self.fit(sequences, slot.blocks * sequences)

    def fit_among_others(self, client: ClientShare, sequences: int, blocks: int) -> bool:
        """Whether there is room for N sequences of a client while there are other clients.

        The reserve is for clients that ask for little, and for what would not fit without it. Nothing waits inside the
        executor, where it would be behind what others have there, and before what they send later.
        """
        if not self.fit(sequences, blocks) or (self.sequences and self.sequences + sequences > self.max_running):
            return False
        places, kv_blocks = self.max_running - self.reserve, self.executor.limits.kv_blocks
        available = kv_blocks - self.reserved_blocks
        little = client.admitted <= max(1, self.max_running // 2)
        if not client.running and (little or sequences > places or blocks > available > 0):
            return True
        return (self.sequences + sequences <= places or (little and client.running + sequences <= self.reserve)) and (
            not kv_blocks
            or self.blocks + blocks <= available
            or (little and client.blocks + blocks <= self.reserved_blocks)
        )


class Slot(msgspec.Struct, eq=False):
    """A sequence in the rolling batch, from `RollingBatch.submit` to its end in the executor.

    The beams of a request share one message, and enter the executor together. `places` are those of the executor in
    which it runs, None while it waits. `seeded`: it is sampled with a seed from its client.
    """

    state: RequestState
    sequence: OutputSequence
    message: Submit
    blocks: int
    client: ClientShare
    priority: int = 0
    seeded: bool = False
    places: Places | None = None
    overtaken: int = 0
    """Sequences that started before it when it was next and did not fit."""
    moves: int = 0
    """The number of times that the sequence has given its place away."""
    _had: int = 0
    """Tokens that it had when it took its place."""
    _begun: int = 0
    """Tokens that its client is charged for at its start in this place: the prompt, or none where it goes on."""
    _expected: int = 0
    """The service that its client may get in its place: service = prompt tokens + 2 * output tokens."""

    def runs_in(self, executor: ExecutorPort) -> bool:
        return self.places is not None and self.places.executor is executor

    @property
    def got(self) -> int:
        """Tokens that the sequence has got since it took its place."""
        return 0 if self.places is None else len(self.sequence.token_ids) - self._had

    @property
    def begins(self) -> bool:
        """Whether the sequence had no tokens when it took its place. Its prompt counts then, and not when it goes on
        later."""
        return not self._had

    @property
    def beams(self) -> int:
        return self.message.sampling.beam_width

    def enter(self, places: Places) -> None:
        """Take a place in an executor."""
        places.sequences += 1
        places.blocks += self.blocks
        self.places = places
        self.sequence.stale = False
        self._had = len(self.sequence.token_ids)
        self._begun = 0 if self._had else len(self.message.prompt_ids)
        client = self.client
        client.running += 1
        client.blocks += self.blocks
        self._expected = self._begun + _OUTPUT_WEIGHT * (self.message.sampling.max_new_tokens - self._had)
        client.expected += self._expected

    def leave(self) -> None:
        """Give the place back."""
        assert self.places is not None
        self.places.sequences -= 1
        self.places.blocks -= self.blocks
        self.places = None
        client = self.client
        client.running -= 1
        client.blocks -= self.blocks
        client.expected -= self._expected
        client.service += self._begun + _OUTPUT_WEIGHT * (len(self.sequence.token_ids) - self._had)

    @property
    def complete(self) -> bool:
        """Whether the sequence has all its tokens."""
        if self.message.pooling is not None:
            return False
        return len(self.sequence.token_ids) >= self.message.sampling.max_new_tokens


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting sequences of a client by priority. `turn` is the number of starts when the client was served last."""

    client: ClientShare
    number: int
    lanes: dict[int, OrderedDict[int, Slot]] = field(default_factory=dict)
    turn: int = 0
    entry: "_Entry | None" = None

    @property
    def head(self) -> tuple[int, Slot]:
        return next(iter(self.lanes[max(self.lanes)].items()))


_Entry = tuple[int, int, int, int, _Line]
"""(-priority, service, last turn, number, line): because of the number, lines are never compared."""


class WaitingQueue:
    """The sequences that no executor has, by id. The beams of a request have ids in a row, and start together.

    service = prompt tokens + 2 x output tokens, of a client's sequences so far; those that run count with all that they
    may still get, so that a client cannot take every place before its first token counts. Next is the waiting sequence
    of the client with the lowest service, as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
    A client that had nothing to wait for does not save up: it begins where the client is that was served last. With one
    client this is first come, first served.

    A sequence that is next and does not fit is waited for, so that large ones start. Up to `_MOST_OVERTAKING` sequences
    of clients without a running one may start before it. One that would fit if less of its own client ran waits for
    that, and delays nobody. Of `_TURNS` sequences that start one is the oldest, whatever its client was given.
    """

    def __init__(self) -> None:
        self._resumed: OrderedDict[int, Slot] = OrderedDict()
        """Sequences that ran in a lost executor. They go before all others."""
        self._held: OrderedDict[int, Slot] = OrderedDict()
        """Sequences that do not start before `release`."""
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        """All other sequences, the oldest first."""
        self._lines: dict[ClientShare, _Line] = {}
        self._heap: list[_Entry] = []
        self._served: dict[int, int] = {}
        """The service of the client that was served last, by priority."""
        self._turn = self._turns_of_others = self._number = 0
        self.starving: Slot | None = None
        """The first sequence for which `next` found no room although its client has nothing that runs."""

    def __len__(self) -> int:
        return len(self._resumed) + len(self._held) + len(self._slots)

    def values(self) -> list[Slot]:
        return [*self._resumed.values(), *self._held.values(), *self._slots.values()]

    @property
    def resumed(self) -> Mapping[int, Slot]:
        return self._resumed

    @property
    def held(self) -> Mapping[int, Slot]:
        return self._held

    # -- in and out ------------------------------------------------------------------------------------------------

    def add(self, request_id: int, slot: Slot) -> None:
        """Add a new sequence, the last of its client."""
        client = slot.client
        if client not in self._lines:
            client.service = max(client.service, self._served.get(slot.priority, 0))
        self._insert(request_id, slot)

    def skip(self, slot: Slot) -> None:
        """Note that a new sequence starts at once: nothing waits, and there is a place for it."""
        client = slot.client
        client.service = self._served[slot.priority] = max(client.service, self._served.get(slot.priority, 0))
        self._turns_of_others = 0

    def put_back(self, request_id: int, slot: Slot) -> None:
        """Put back a sequence that had started, as the oldest of all and the first of its client."""
        self._insert(request_id, slot)
        self._slots.move_to_end(request_id, last=False)
        line = self._lines[slot.client]
        line.lanes[slot.priority].move_to_end(request_id, last=False)

    def resume(self, lost: Mapping[int, Slot]) -> None:
        """Put the sequences of a lost executor, in their order, before all others."""
        self._resumed = OrderedDict([*lost.items(), *self._resumed.items()])

    def hold(self, request_id: int, slot: Slot) -> None:
        """Set a sequence aside that must not start yet."""
        self._held[request_id] = slot

    def release(self, request_ids: Iterable[int]) -> None:
        """Queue held sequences after those of a lost executor, before all others."""
        for request_id in request_ids:
            self._resumed[request_id] = self._held.pop(request_id)

    def remove(self, request_id: int) -> Slot | None:
        """Take a sequence out, None if it does not wait."""
        for aside in (self._resumed, self._held):
            if (slot := aside.pop(request_id, None)) is not None:
                return slot
        if (slot := self._slots.pop(request_id, None)) is None:
            return None
        line = self._lines[slot.client]
        lane = line.lanes[slot.priority]
        del lane[request_id]
        if not lane:
            del line.lanes[slot.priority]
        if line.lanes:
            self.place(slot.client)
        else:
            line.entry = None
            del self._lines[slot.client]
        return slot

    def clear(self) -> None:
        self._resumed.clear()
        self._held.clear()
        self._slots.clear()
        self._lines.clear()
        self._heap.clear()

    def place(self, client: ClientShare) -> None:
        """Put a client into its place in the order, after its service or its first sequence has changed."""
        line = self._lines.get(client)
        if line is None:
            return
        entry = (-max(line.lanes), client.service + client.expected, line.turn, line.number, line)
        if line.entry is not None and line.entry[:3] == entry[:3]:
            return
        line.entry = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._lines) + _STALE:
            self._heap = [each.entry for each in self._lines.values() if each.entry is not None]
            heapq.heapify(self._heap)

    # -- who is next -----------------------------------------------------------------------------------------------

    def next(self, places: Places, crowded: bool, *, resumed_only: bool = False) -> int | None:
        """The id of the sequence that is next, if there is a place for it. `crowded`: there are several clients."""
        self.starving = None
        for request_id, slot in self._resumed.items():
            return request_id if places.fit(slot.beams, slot.blocks * slot.beams) else None
        if resumed_only or not self._slots:
            return None
        with contextlib.closing(self._candidates()) as candidates:
            return self._first_that_fits(candidates, places, crowded)

    def _first_that_fits(self, candidates: Iterable[tuple[int, Slot]], places: Places, crowded: bool) -> int | None:
        blocked: Slot | None = None
        count = 0
        for request_id, slot in candidates:
            client = slot.client
            if blocked is not None and client.running:
                continue
            if places.has_room(slot, crowded=crowded):
                if blocked is not None:
                    blocked.overtaken += 1
                return request_id
            if client.running and places.fit(slot.beams - client.running, slot.blocks * slot.beams - client.blocks):
                continue
            if self.starving is None and not client.running:
                self.starving = slot
            blocked, count = blocked or slot, count + 1
            if blocked.overtaken >= _MOST_OVERTAKING or count >= _MOST_BLOCKED:
                break
        return None

    def take(self, request_id: int) -> list[Slot]:
        """Take a sequence out that `next` has named, with its beams: it starts."""
        slot = self._resumed.get(request_id)
        if slot is None:
            slot = self._slots[request_id]
            self._turn += 1
            oldest = next(iter(self._slots)) == request_id
            self._turns_of_others = 0 if oldest else self._turns_of_others + 1
            self._served[slot.priority] = slot.client.service
            self._lines[slot.client].turn = self._turn
        taken = [self.remove(each) for each in range(request_id, request_id + slot.beams)]
        return [each for each in taken if each is not None]

    def _candidates(self) -> Generator[tuple[int, Slot], None, None]:
        """The sequences that may be next, in their order: one of each client."""
        if self._slots and self._turns_of_others >= _TURNS - 1:
            yield next(iter(self._slots.items()))
        seen: list[_Entry] = []
        try:
            while self._heap:
                entry = self._heap[0]
                line = entry[-1]
                if line.entry is entry:
                    yield line.head
                    seen.append(entry)  # another one is asked for, which is rare
                heapq.heappop(self._heap)
        finally:
            for entry in seen:
                heapq.heappush(self._heap, entry)

    def _insert(self, request_id: int, slot: Slot) -> None:
        line = self._lines.get(slot.client)
        if line is None:
            self._number += 1
            line = self._lines[slot.client] = _Line(slot.client, self._number)
        line.lanes.setdefault(slot.priority, OrderedDict())[request_id] = slot
        self._slots[request_id] = slot
        self.place(slot.client)
