"""Which sequence is next: fair shares among clients, first come, first served for each of them.

Next is the client that was given least, as in "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A
client that had nothing to wait for does not save up: it begins where the client is that was served last. With one
client this is first come, first served.

A sequence that is next and does not fit is waited for, so that large ones start. Up to `_MOST_OVERTAKING` sequences of
clients of which nothing runs may start before it. One that would fit if less of its own client ran waits for that, and
delays nobody. Of `_TURNS` sequences one is that which waits longest, whatever its client was given.
"""

from __future__ import annotations

import contextlib
import heapq
from collections import OrderedDict
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from djl_trtllm.batching.clients import Client
from djl_trtllm.batching.places import Places
from djl_trtllm.batching.slot import Slot

_TURNS = 8
_MOST_OVERTAKING = 16
_MOST_BLOCKED = 16
"""Clients that are looked at for one that fits."""
_STALE = 64
"""Entries of the heap that may be out of date, beside one for each client."""


@dataclass(slots=True, eq=False)
class _Line:
    """The waiting sequences of a client by priority. `turn` counts starts: when it was served last."""

    client: Client
    number: int
    lanes: dict[int, OrderedDict[int, Slot]] = field(default_factory=dict)
    turn: int = 0
    entry: _Entry | None = None

    @property
    def head(self) -> tuple[int, Slot]:
        return next(iter(self.lanes[max(self.lanes)].items()))


_Entry = tuple[int, int, int, int, _Line]
"""Priority (negative), what its client was given, its last turn; a number, so that lines are not compared."""


class WaitingQueue:
    """The sequences that no executor has, by id. The beams of a request have ids in a row, and start together."""

    def __init__(self) -> None:
        self._resumed: OrderedDict[int, Slot] = OrderedDict()
        """They ran in an executor that was lost, and go before all others."""
        self._slots: OrderedDict[int, Slot] = OrderedDict()
        """All others, the oldest first."""
        self._lines: dict[Client, _Line] = {}
        self._heap: list[_Entry] = []
        self._served: dict[int, int] = {}
        """By priority: what the client was given that was served last."""
        self._turn = self._turns_of_others = self._number = 0
        self.starving: Slot | None = None
        """What `next` found that does not fit, of a client of which nothing runs."""

    def __len__(self) -> int:
        return len(self._resumed) + len(self._slots)

    def values(self) -> list[Slot]:
        return [*self._resumed.values(), *self._slots.values()]

    # -- in and out ------------------------------------------------------------------------------------------------

    def add(self, request_id: int, slot: Slot) -> None:
        """A new sequence, the last of its client."""
        client = slot.client
        if client not in self._lines:
            client.service = max(client.service, self._served.get(slot.priority, 0))
        self._insert(request_id, slot)

    def put_back(self, request_id: int, slot: Slot) -> None:
        """A sequence that had started, the first of its client."""
        self._insert(request_id, slot)
        self._slots.move_to_end(request_id, last=False)
        line = self._lines[slot.client]
        line.lanes[slot.priority].move_to_end(request_id, last=False)

    def resume(self, lost: Mapping[int, Slot]) -> None:
        """Sequences of a lost executor, in their order: they are next."""
        self._resumed = OrderedDict([*lost.items(), *self._resumed.items()])

    def remove(self, request_id: int) -> Slot | None:
        """Take a sequence out, None if it does not wait."""
        if (slot := self._resumed.pop(request_id, None)) is not None:
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
        self._slots.clear()
        self._lines.clear()
        self._heap.clear()

    def place(self, client: Client) -> None:
        """Find the place of a client again: what it was given, or its first sequence, is another one."""
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

    def next(self, places: Places, crowded: bool) -> int | None:
        """The id of the sequence that is next, if there is a place for it. `crowded`: there are several clients."""
        self.starving = None
        for request_id, slot in self._resumed.items():
            return request_id if places.fit(slot.beams, slot.blocks * slot.beams) else None
        if not self._slots:
            return None
        blocked: Slot | None = None
        count = 0
        with contextlib.closing(self._candidates()) as candidates:
            for request_id, slot in candidates:
                client, size = slot.client, (slot.beams, slot.blocks * slot.beams)
                if blocked is not None and client.running:
                    continue
                if places.fit_among_others(client, *size) if crowded else places.fit(*size):
                    if blocked is not None:
                        blocked.overtaken += 1
                    return request_id
                if client.running and places.fit_alone(client, *size):
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
