"""Which sequence is next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.clients import Client
from djl_trtllm.batching.places import Places
from djl_trtllm.batching.slot import Slot
from djl_trtllm.batching.waiting_queue import WaitingQueue
from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.request import Sampling
from tests.batching.helpers import FakeExecutor


class Queue:
    """A queue, its clients, and the places of an executor."""

    def __init__(self, places: int = 100, kv_blocks: int = 0) -> None:
        self.queue = WaitingQueue()
        self.places = Places(FakeExecutor(Limits(places, kv_blocks, 10, 1000)), places)
        self.clients: dict[str, Client] = {}
        self.slots: dict[int, Slot] = {}
        self.crowded = False

    def add(self, key: str, tokens: int = 10, priority: int = 0, beams: int = 1, blocks: int = 1) -> int:
        client = self.clients.setdefault(key, Client(key))
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


def test_one_client_is_served_in_the_order_of_its_requests() -> None:
    queue = Queue()
    expected = [queue.add("a", tokens) for tokens in (50, 1, 30, 2)]
    assert [queue.start() for _ in range(5)] == [*expected, None]
    assert len(queue.queue) == 0


def test_clients_take_turns() -> None:
    queue = Queue()
    for key in "aaaabb":
        queue.add(key)
    assert "".join(queue.order()) == "ababaa"


def test_the_client_that_was_given_least_is_next() -> None:
    queue = Queue()
    for key, tokens in (("a", 30), ("a", 30), ("b", 10), ("b", 10), ("b", 10), ("b", 10)):
        queue.add(key, tokens)
    # 70 for each of a's (10 tokens of prompt, and twice 30), 30 for each of b's.
    assert "".join(queue.order()) == "abbbab"


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
    for key in ("busy",) * 4 + ("away",) * 4:
        queue.add(key)
    order = "".join(key[0] for key in queue.order())
    assert order in ("abababab", "aabababb", "babababa")


def test_a_client_that_comes_back_has_what_it_was_given() -> None:
    queue = Queue()
    queue.end(_started(queue, "much"), tokens=100)
    for key in ("much", "less", "less"):
        queue.add(key)
    assert queue.order() == ["less", "less", "much"]


def _started(queue: Queue, key: str) -> int:
    request_id = queue.add(key)
    assert queue.start() == request_id
    return request_id


def test_a_new_client_is_before_one_that_has_as_much() -> None:
    queue = Queue()
    for _ in range(3):
        queue.add("old")
    queue.start()
    queue.add("new")
    assert queue.order() == ["new", "old", "old"]


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


def test_clients_that_come_anew_do_not_starve_one_that_was_given_more() -> None:
    queue = Queue(places=1)
    queue.add("old", 1000)
    running = queue.start()
    old = queue.add("old", 1000)
    for number in range(9):
        assert running is not None
        queue.add(f"new {number}")
        queue.add(f"newer {number}")
        queue.end(running)
        if (running := queue.start()) == old:
            break
    assert running == old


def test_a_sequence_that_does_not_fit_is_waited_for() -> None:
    queue = Queue(places=4, kv_blocks=10)
    first = _started_with(queue, "a", 6)
    _started_with(queue, "b", 1)
    large = queue.add("c", blocks=8)
    queue.add("b", blocks=1)
    assert queue.start() is None
    queue.end(first)
    assert queue.start() == large


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
    queue = Queue(places=10, kv_blocks=100)
    _started_with(queue, "large", 80)
    queue.add("large", blocks=80)
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


def test_sequences_of_a_lost_executor_are_before_all_others() -> None:
    queue = Queue()
    waiting, ran = queue.add("a", priority=1), queue.add("b")
    also = queue.add("c", priority=-1)
    lost = {each: slot for each in (also, ran) if (slot := queue.queue.remove(each)) is not None}
    queue.queue.resume(lost)
    assert [queue.start() for _ in range(3)] == [also, ran, waiting]


def test_a_sequence_that_gave_its_place_away_is_the_first_of_its_client() -> None:
    queue = Queue()
    ids = [queue.add("a") for _ in range(3)]
    assert queue.start() == ids[0]
    slot = queue.slots[ids[0]]
    slot.leave()
    queue.queue.put_back(ids[0], slot)
    assert [queue.start() for _ in range(3)] == ids


def test_what_was_taken_out_is_not_next() -> None:
    queue = Queue()
    ids = [queue.add(key) for key in "aab"]
    assert queue.queue.remove(ids[0]) is queue.slots[ids[0]]
    assert queue.queue.remove(ids[0]) is None
    assert queue.queue.remove(ids[2]) is queue.slots[ids[2]]
    assert [*queue.queue.values()] == [queue.slots[ids[1]]]
    assert [queue.start(), queue.start()] == [ids[1], None]
    queue.add("b")
    queue.queue.clear()
    assert (len(queue.queue), queue.start()) == (0, None)
    last = queue.add("c")
    assert [queue.start(), queue.start()] == [last, None]


def test_the_heap_stays_as_small_as_the_number_of_clients() -> None:
    queue = Queue()
    for key in "ab":
        queue.add(key)
    for turn in range(1000):
        client = queue.clients["ab"[turn % 2]]
        client.service += 1
        queue.queue.place(client)
    assert len(queue.queue._heap) <= 2 * 2 + 65


def test_the_order_stays_however_often_clients_are_placed() -> None:
    queue = Queue()
    queue.add("a")
    other = queue.add("b")
    for _ in range(200):
        queue.clients["a"].service += 1
        queue.queue.place(queue.clients["a"])
        assert queue.queue.next(queue.places, crowded=True) == other


def test_who_starves_is_told() -> None:
    queue = Queue(places=2)
    _started_with(queue, "a", 1)
    _started_with(queue, "a", 1)
    queue.add("a")
    queue.start()
    assert queue.queue.starving is None
    light = queue.add("b")
    assert queue.start() is None
    assert queue.queue.starving is queue.slots[light]


def test_nobody_starves_while_sequences_of_a_lost_executor_wait() -> None:
    queue = Queue(places=1)
    lost = queue.add("lost")
    slot = queue.queue.remove(lost)
    _started_with(queue, "a", 1)
    light = queue.add("b")
    assert (queue.start(), queue.queue.starving) == (None, queue.slots[light])
    assert slot is not None
    queue.queue.resume({lost: slot})
    assert (queue.start(), queue.queue.starving) == (None, None)
