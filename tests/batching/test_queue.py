"""What each client has of a rolling batch."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.queue import ClientShare, ClientShares, Places, Slot, WaitingQueue
from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.request import Sampling
from tests.batching.helpers import FakeExecutor
from tests.support.tables import by_rows
from tests.support.virtual_time import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def clients(clock: Clock) -> ClientShares:
    return ClientShares(clock)


def admitted(clients: ClientShares, key: str, sequences: int = 1) -> ClientShare:
    client = clients.find(key)
    clients.admit(client, sequences)
    return client


def test_the_last_4096_clients_without_requests_are_remembered(clients: ClientShares) -> None:
    first, kept = admitted(clients, "first", 2), admitted(clients, "kept")
    clients.release(first)
    assert (clients.find("first"), len(clients)) == (first, 2)
    clients.release(first)
    clients.release(kept)
    admitted(clients, "kept")  # it comes back, and leaves again after the first
    clients.release(kept)
    for number in range(4095):
        clients.release(admitted(clients, str(number)))
    assert (clients.find("kept"), len(clients)) == (kept, 0)
    assert clients.find("first") is not first


@pytest.mark.parametrize(
    ("events", "crowded"),
    [
        ("", False),
        ("+a 1 +a 1 +a", False),
        ("+a +b 10000", True),
        *((f"+a 10000 +b -b {seconds}", seconds < 300) for seconds in (0, 299, 301)),
        # The client that left last counts, and from when it left.
        ("+x -x 1000 +y -y +a", True),
        ("+a -a 200 +b", True),
        ("+a -a 200 +b 101 +b", False),
    ],
)
def test_a_client_is_in_a_crowd_while_there_are_others_and_five_minutes_longer(
    clients: ClientShares, clock: Clock, events: str, crowded: bool
) -> None:
    for event in events.split():
        if event.isdecimal():
            clock.now += int(event)
        elif event[0] == "+":
            admitted(clients, event[1:])
        else:
            clients.release(clients.find(event[1:]))
    assert clients.crowded is crowded


def test_a_full_queue_has_room_for_the_share_of_another_client(clients: ClientShares) -> None:
    flood = admitted(clients, "flood", 10)
    assert not clients.has_share(flood, 1, 10)
    light = clients.find("light")
    assert clients.has_share(light, 5, 10)
    assert not clients.has_share(light, 6, 10)
    admitted(clients, "light", 4)
    assert clients.has_share(clients.find("light"), 1, 10)
    assert not clients.has_share(clients.find("light"), 2, 10)
    assert not clients.has_share(flood, 1, 10)
    assert not clients.has_share(clients.find("third"), 4, 10)
    assert clients.has_share(clients.find("third"), 3, 10)


@by_rows(
    ("sequences", "blocks", "kv_blocks", "asked", "fit"),
    [
        *((3, 3000, 0, (1, 1000), True), (3, 3000, 0, (2, 2000), False), (2, 0, 0, (2, 2000), True)),
        *((1, 4, 10, (1, 6), True), (1, 4, 10, (1, 7), False), (0, 0, 10, (1, 10), True)),
    ],
)
def test_sequences_fit_into_the_places_and_blocks_that_there_are(
    sequences: int, blocks: int, kv_blocks: int, asked: tuple[int, int], fit: bool
) -> None:
    places = Places(FakeExecutor(Limits(4, kv_blocks, 32, 100)), 4, sequences=sequences, blocks=blocks)
    assert places.fit(*asked) is fit


def test_one_of_16_places_and_blocks_is_a_reserve_but_never_the_only_place() -> None:
    made = [Places(FakeExecutor(Limits(number, 10 * number, 32, 100)), number) for number in (1, 2, 16, 32, 40)]
    assert [(each.reserve, each.reserved_blocks) for each in made] == [(0, 0), (1, 1), (1, 10), (2, 20), (2, 25)]


def taken(sequences: int, blocks: int = 0, kv_blocks: int = 0, lookahead: int = 0) -> Places:
    """Some of 32 places, of which two are the reserve, and of the blocks."""
    some = Places(FakeExecutor(Limits(32, kv_blocks, 32, 100)), 32, lookahead)
    some.sequences, some.blocks = sequences, blocks
    return some


LITTLE, MUCH = 16, 17
"""Sequences that a client asks for."""


@by_rows(
    ("running", "admitted", "of_its_own", "sequences", "fit"),
    [
        (29, MUCH, 5, 1, True),
        (30, MUCH, 5, 1, False),
        (30, MUCH, 0, 1, False),
        (31, LITTLE, 0, 1, True),
        (32, LITTLE, 0, 1, False),
        (30, LITTLE, 1, 1, True),
        (30, LITTLE, 2, 1, False),
        (29, LITTLE, 2, 1, True),
        (29, LITTLE, 0, 3, True),
        (29, LITTLE, 1, 3, False),
        (0, 31, 0, 31, True),
        (1, 31, 0, 30, False),
        (1, 31, 0, 31, True),
    ],
)
def test_the_last_places_are_for_clients_that_ask_for_little_and_for_what_needs_them(
    running: int, admitted: int, of_its_own: int, sequences: int, fit: bool
) -> None:
    client = ClientShare("a", admitted=admitted, running=of_its_own)
    assert taken(running).fit_among_others(client, sequences, 7) is fit


@by_rows(
    ("blocks", "admitted", "of_its_own", "asked", "fit"),
    [
        (140, MUCH, 50, 10, True),
        (141, MUCH, 50, 10, False),
        (141, MUCH, 0, 10, False),
        (150, LITTLE, 0, 10, True),
        (149, LITTLE, 0, 11, True),
        (149, LITTLE, 1, 11, False),
        (151, LITTLE, 0, 10, False),
        (150, LITTLE, 3, 7, True),
        (150, LITTLE, 4, 7, False),
        (0, MUCH, 0, 151, True),
        (5, MUCH, 0, 150, False),
    ],
)
def test_the_last_blocks_are_for_them_too(blocks: int, admitted: int, of_its_own: int, asked: int, fit: bool) -> None:
    client = ClientShare("a", admitted=admitted, running=bool(of_its_own), blocks=of_its_own)
    assert taken(5, blocks, kv_blocks=160).fit_among_others(client, 1, asked) is fit


def test_with_few_places_one_sequence_is_little() -> None:
    some = Places(FakeExecutor(Limits(2, 0, 32, 100)), 2, sequences=1)
    assert some.fit_among_others(ClientShare("a", admitted=1), 1, 0)
    assert not some.fit_among_others(ClientShare("a", admitted=2), 1, 0)


def test_among_others_nothing_waits_inside_the_executor_unless_it_is_alone_there() -> None:
    client = ClientShare("a", admitted=1)
    assert taken(31, lookahead=4).fit_among_others(client, 1, 0)
    assert not taken(32, lookahead=4).fit_among_others(client, 1, 0)
    assert not taken(1, lookahead=4).fit_among_others(client, 33, 0)
    assert taken(0, lookahead=4).fit_among_others(client, 33, 0)


def slot() -> Slot:
    """A sequence with two tokens of prompt that asks for three."""
    message = Submit(0, [1, 2], Sampling(max_new_tokens=3))
    return Slot(cast(Any, None), cast(Any, SimpleNamespace(token_ids=[])), message, 5, ClientShare("a"))


def test_its_client_has_what_it_takes_and_is_given_what_it_got() -> None:
    places, one = Places(FakeExecutor(Limits(4, 0, 32, 100)), 4), slot()
    client = one.client
    # Two tokens of the prompt, and twice the three that it may get. The prompt is charged once.
    for begins, expected, token, service in ((True, 8, 7, 4), (False, 4, 8, 6)):
        one.enter(places)
        assert (one.begins, client.running, client.blocks, client.expected) == (begins, 1, 5, expected)
        one.sequence.token_ids += [token]
        one.leave()
        assert (client.running, client.blocks, client.service, client.expected) == (0, 0, service, 0)


class Queue:
    """A queue, its clients, and the places of an executor."""

    def __init__(self, places: int = 100, kv_blocks: int = 0) -> None:
        self.queue = WaitingQueue()
        self.places = Places(FakeExecutor(Limits(places, kv_blocks, 10, 1000)), places)
        self.clients: dict[str, ClientShare] = {}
        self.slots: dict[int, Slot] = {}
        self.crowded = False

    def add(self, key: str, tokens: int = 10, priority: int = 0, beams: int = 1, blocks: int = 1) -> int:
        client = self.clients.setdefault(key, ClientShare(key))
        client.admitted += beams
        request_id = len(self.slots)
        message = Submit(request_id, [1] * 10, Sampling(max_new_tokens=tokens, beam_width=beams))
        for beam_id in range(request_id, request_id + beams):
            sequence = SimpleNamespace(token_ids=[])
            slot = Slot(cast(Any, None), cast(Any, sequence), message, blocks, client, priority)
            self.slots[beam_id] = slot
            self.queue.add(beam_id, slot)
        return request_id

    def start(self) -> int | None:
        """Start the next sequence."""
        request_id = self.queue.next(self.places, self.crowded)
        if request_id is not None:
            for slot in self.queue.take(request_id):
                slot.enter(self.places)
            self.queue.place(self.slots[request_id].client)
        return request_id

    def end(self, request_id: int, tokens: int = 10) -> None:
        slot = self.slots[request_id]
        slot.sequence.token_ids += [5] * tokens
        slot.leave()
        slot.client.admitted -= 1
        self.queue.place(slot.client)

    def order(self, count: int | None = None) -> list[str]:
        """The clients of the next sequences, in the order in which they start."""
        found: list[str] = []
        while (count is None or len(found) < count) and (request_id := self.start()) is not None:
            found.append(self.slots[request_id].client.key)
        return found


@pytest.mark.parametrize(
    ("asked", "order"),
    [
        ("a50 a1 a30 a2", "0123"),  # one client: in the order of its requests
        ("a10 a10 a10 a10 b10 b10", "041523"),
        # 70 for each of a's (10 tokens of prompt, and twice 30), 30 for each of b's.
        ("a30 a30 b10 b10 b10 b10", "023415"),
        ("a10! a10 a10 b10", "0312"),  # a has a place when b comes
        ("a10 b25 a10 a10 b10", "01243"),  # both have 60: first the one that was served longer ago
    ],
)
def test_the_client_that_was_given_least_is_next(asked: str, order: str) -> None:
    queue, started = Queue(), ""
    for each in asked.split():
        queue.add(each[0], int(each[1:].rstrip("!")))
        if each.endswith("!"):
            started += str(queue.start())
    assert started + "".join(str(queue.start()) for _ in order[len(started) :]) == order
    assert (queue.start(), len(queue.queue)) == (None, 0)


def test_what_was_taken_out_is_not_next() -> None:
    queue = Queue()
    ids = [queue.add(key) for key in "aab"]
    assert [queue.queue.remove(ids[each]) for each in (0, 0, 2)] == [queue.slots[ids[0]], None, queue.slots[ids[2]]]
    assert [*queue.queue.values()] == [queue.slots[ids[1]]]
    assert queue.start() == ids[1]
    queue.add("b")
    queue.queue.clear()
    assert (len(queue.queue), queue.start()) == (0, None)
    assert queue.add("c") == queue.start()


def test_of_clients_that_have_left_nothing_stays_behind_one_that_waits() -> None:
    queue = Queue()
    queue.add("waits", priority=1)
    for number in range(1000):
        request_id = queue.add(str(number))
        assert queue.queue.remove(request_id) == queue.slots.pop(request_id)
        del queue.clients[str(number)]
    assert sum(isinstance(each, ClientShare) for each in gc.get_objects()) < 500


def test_what_was_not_generated_is_not_charged() -> None:
    queue = Queue()
    first = queue.add("a", 100)
    queue.add("a", 100)
    for _ in range(3):
        queue.add("b", 10)
    assert queue.order(2) == ["a", "b"]
    queue.end(first, 1)
    assert queue.clients["a"].service == 12
    assert queue.order() == ["a", "b", "b"]


def test_a_client_that_was_away_has_not_saved_up() -> None:
    queue = Queue()
    queue.end(_started(queue, "away"))
    for _ in range(20):
        queue.end(_started(queue, "busy"))
    for _ in range(4):
        queue.add("busy")
    order = ""
    while len(order) < 8:
        if order.count("a") == queue.clients["away"].admitted:
            queue.add("away")  # it asks one by one
        order += queue.order(1)[0][0]
    assert "aaa" not in order and "bbb" not in order


def _started(queue: Queue, key: str) -> int:
    request_id = queue.add(key)
    assert queue.start() == request_id
    return request_id


def test_a_higher_priority_is_first_and_keeps_the_order_of_its_client() -> None:
    queue = Queue()
    ids = [queue.add("a", priority=priority) for priority in (0, -1, 1, 1, 0)]
    other = queue.add("b", priority=0)
    assert [queue.start() for _ in range(6)] == [ids[2], ids[3], other, ids[0], ids[4], ids[1]]


def test_one_of_eight_is_the_sequence_that_waits_longest() -> None:
    queue = Queue()
    low = queue.add("low", priority=-1)
    for _ in range(20):
        queue.add("high", priority=1)
    assert [queue.start() for _ in range(8)].index(low) == 7


def _started_with(queue: Queue, key: str, blocks: int) -> int:
    request_id = queue.add(key, blocks=blocks)
    assert queue.start() == request_id
    return request_id


def test_only_so_many_of_clients_without_a_sequence_go_before_one_that_does_not_fit() -> None:
    queue = Queue(places=100, kv_blocks=1000)
    _started_with(queue, "a", 600)
    large = queue.add("b", blocks=500)
    for number in range(20):
        queue.add(f"small {number}")
    assert len(queue.order()) == 16
    assert queue.slots[large].overtaken == 16
    queue.end(0)
    assert queue.start() == large
    assert len(queue.order()) == 4


@pytest.mark.parametrize(("large", "small_one_starts"), [(15, True), (16, False)])
def test_only_so_many_clients_are_looked_at_for_one_that_fits(large: int, small_one_starts: bool) -> None:
    queue = Queue(kv_blocks=100)
    _started_with(queue, "a", 60)
    for number in range(large):
        queue.add(f"large {number}", blocks=50)
    small = queue.add("small")
    assert queue.start() == (small if small_one_starts else None)


def test_a_client_waits_for_itself_and_delays_nobody() -> None:
    queue = Queue(places=7, kv_blocks=100)
    _started_with(queue, "large", 80)
    queue.add("large", blocks=95)  # all that is left beside five of the others
    assert queue.start() is None
    for _ in range(6):
        queue.add("small")
    assert queue.order() == ["small"] * 6


@pytest.mark.parametrize("number", [2, 3])
def test_beams_start_together(number: int) -> None:
    queue = Queue(places=3)
    if number == 2:
        _started_with(queue, "a", 1)
    beams = queue.add("a", beams=3)
    after = queue.add("a")
    if number == 2:
        assert queue.start() is None
        queue.end(0)
    assert queue.start() == beams
    assert (queue.places.sequences, queue.start()) == (3, None)
    assert len(queue.queue) == 1
    assert queue.queue.remove(after) is queue.slots[after]


def test_sequences_lost_twice_keep_their_order_and_are_before_all_others() -> None:
    queue = Queue()
    ids = [queue.add(key, priority=priority) for priority, key in enumerate("abcde", -1)]
    for lost in (ids[2:], ids[:2]):  # the second two wait while the executor of the first two is lost
        queue.queue.resume({each: queue.slots[each] for each in lost if queue.queue.remove(each) is not None})
    assert [queue.start() for _ in range(5)] == ids


def put_back(queue: Queue, request_id: int) -> None:
    """A sequence gives its place away."""
    queue.slots[request_id].leave()
    queue.queue.put_back(request_id, queue.slots[request_id])


def test_a_sequence_that_gave_its_place_away_is_the_first_of_its_client() -> None:
    queue = Queue()
    ids = [queue.add("a") for _ in range(3)]
    assert queue.start() == ids[0]
    put_back(queue, ids[0])
    assert [queue.start() for _ in range(3)] == ids


def test_a_sequence_that_gave_its_place_away_is_the_oldest() -> None:
    queue = Queue()
    moved = _started(queue, "low")
    other = queue.add("lower", priority=-1)
    for _ in range(20):
        queue.add("high", priority=1)
    put_back(queue, moved)
    assert [each for each in (queue.start() for _ in range(16)) if each in (moved, other)] == [moved, other]


def test_a_new_client_begins_where_the_last_one_of_its_priority_was() -> None:
    queue = Queue()
    queue.end(_started(queue, "old"))
    for _ in range(5):
        urgent = queue.add("urgent", priority=1)
        assert queue.start() == urgent
        queue.end(urgent, tokens=100)
    for key in ("old", "old", "new"):
        queue.add(key)
    assert queue.order() == ["new", "old", "old"]


def test_a_client_that_need_not_wait_begins_where_the_last_one_was_and_is_the_last_one_then() -> None:
    queue = Queue()
    for _ in range(2):
        queue.end(_started(queue, "old"))
    began = queue.slots[1].client.service - 30  # the last of them was charged for 10 tokens and twice 10
    message, sequence = Submit(2, [1] * 10, Sampling(max_new_tokens=90)), SimpleNamespace(token_ids=[])
    for key, service in (("new", 0), ("given", 100)):
        client = queue.clients[key] = ClientShare(key, service=service)
        queue.queue.skip(Slot(cast(Any, None), cast(Any, sequence), message, 1, client))
    queue.add("late")
    assert (queue.clients["new"].service, queue.clients["late"].service) == (began, 100)


def test_a_sequence_that_need_not_wait_is_the_oldest_of_all_when_it_starts() -> None:
    queue = Queue()
    low = queue.add("low", priority=-1)
    for _ in range(7):
        queue.add("high", priority=1)
    assert queue.order(7) == ["high"] * 7, "the next one is the oldest"
    queue.queue.remove(low)
    queue.queue.skip(queue.slots[low])
    queue.add("low", priority=-1)
    queue.add("high", priority=1)
    assert queue.order() == ["high", "low"]


def test_the_order_stays_however_often_clients_are_placed() -> None:
    queue = Queue()
    queue.add("a")
    other = queue.add("b")
    for _ in range(200):
        queue.clients["a"].service += 1
        queue.queue.place(queue.clients["a"])
        assert queue.queue.next(queue.places, crowded=True) == other


def test_a_client_starves_that_has_nothing_that_runs_and_waits_for_no_lost_sequence() -> None:
    queue = Queue(places=3, kv_blocks=100)
    lost = queue.add("lost")
    slot = queue.queue.remove(lost)
    for key, blocks in (("a", 60), ("a", 1), ("b", 30)):
        _started_with(queue, key, blocks)
    queue.add("b", blocks=90)
    queue.add("a")
    assert (queue.start(), queue.queue.starving) == (None, None)
    light = queue.add("light")
    assert (queue.start(), queue.queue.starving) == (None, queue.slots[light])
    assert slot is not None
    queue.queue.resume({lost: slot})
    assert (queue.start(), queue.queue.starving) == (None, None)
