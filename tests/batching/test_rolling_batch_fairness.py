"""A light client beside floods of every kind, on a played clock.

The engine is played too: an iteration takes `ITERATION` seconds and gives each sequence that has a place a token; what
comes during an iteration takes part in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.queue import ClientShare, Places, Slot, WaitingQueue
from djl_trtllm.batching.rolling_batch import to_move
from djl_trtllm.errors import GenerationError, OverloadedError
from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GenerationRequest, OutputChunk, RequestOrigin, Sampling
from tests.batching.helpers import Bench, FakeExecutor, Recorder
from tests.support.steps import Delta, step_of
from tests.support.tables import by_rows

# -- Which running sequences give their places to another client.


class Running:
    """Sequences that run in an executor with four places and some in its queue."""

    def __init__(self, lookahead: int = 0, kv_blocks: int = 0) -> None:
        self.places = Places(FakeExecutor(Limits(4, kv_blocks, 10, 1000)), 4, lookahead)
        self.running: dict[int, Slot] = {}
        self.clients: dict[str, ClientShare] = {}

    def slot(self, key: str, *, blocks: int = 1, seeded: bool = False, **sampling: Any) -> Slot:
        message = Submit(len(self.running), [1, 2], Sampling(**{"max_new_tokens": 9, **sampling}))
        sequence = SimpleNamespace(finished=None, token_ids=[])
        client = self.clients.setdefault(key, ClientShare(key))
        return Slot(cast(Any, None), cast(Any, sequence), message, blocks, client, seeded=seeded)

    def add(self, key: str, **more: Any) -> Slot:
        slot = self.running[len(self.running)] = self.slot(key, **more)
        slot.enter(self.places)
        return slot

    def moved(self, clients: int = 2, **light: Any) -> list[int]:
        return list(to_move(self.running, self.slot("light", **light), self.places, clients))


@by_rows(
    ("clients", "executor", "asked", "moved"),
    [
        ("aaab", {}, {}, [2]),
        ("aaaaaa", {"lookahead": 2}, {}, [5, 4, 3]),  # those that wait inside the executor move too
        ("aabb", {}, {"clients": 2}, []),  # a client keeps its share
        ("aabb", {}, {"clients": 3}, [1]),
        ("", {}, {}, []),
        # As many as make room, none if they would make too little.
        *(
            ("aaaa", {"kv_blocks": 20}, {"blocks": blocks}, moved)
            for blocks, moved in ((5, [3]), (6, [3, 2]), (10, [3, 2]), (15, []))
        ),
    ],
)
def test_the_last_sequences_of_the_client_with_most_places_move(
    clients: str, executor: dict[str, int], asked: dict[str, int], moved: list[int]
) -> None:
    some = Running(**executor)
    for key in clients:
        some.add(key, blocks=5 if "kv_blocks" in executor else 1)
    assert some.moved(**asked) == moved


@by_rows(
    ("fixed", "changed"),
    [
        *(({"seeded": True}, {}), ({"presence_penalty": 0.5}, {}), ({"min_new_tokens": 5}, {})),
        *(({"max_new_tokens": 999}, {}), ({}, {"moves": 2}), ({}, {"places": Running().places})),
        ({}, {"sequence": SimpleNamespace(finished="ended", token_ids=[])}),
    ],
)
@by_rows("place", [0, 3])
def test_what_could_not_go_on_later_stays(fixed: dict[str, Any], changed: dict[str, Any], place: int) -> None:
    some = Running()
    for number in range(4):
        slot = some.add("a", **(fixed if number == place else {}))
        slot.moves = 1
        for name, value in changed.items() if number == place else ():
            setattr(slot, name, value)
    assert some.moved() == [2 if place == 3 else 3]


def test_the_oldest_moves_if_no_other_can() -> None:
    some = Running(kv_blocks=20)
    for number in range(4):
        some.add("a", blocks=5, seeded=number > 0)
    assert some.moved(blocks=5) == [0]


# -- Several clients: admission, places that are given back, and what is counted meanwhile.


CANCELLED, LENGTH = FinishReason.CANCELLED, FinishReason.LENGTH


@pytest.fixture
def full(tokenizer: Tokenizer) -> Bench:
    """One client has all four places, and another one asks for one."""
    bench = Bench(tokenizer, max_queue_size=100)
    for _ in range(6):
        bench.submit(client="flood")
    bench.step(*(Delta(each, [5]) for each in range(4)))
    bench.submit(client="light")
    return bench


def test_another_client_finds_room_in_a_full_queue(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for _ in range(8):
        bench.submit(client="flood")
    with pytest.raises(OverloadedError):
        bench.batch.admit(1, "flood")
    bench.batch.admit(4, "light")
    with pytest.raises(OverloadedError, match="8 waiting"):
        bench.batch.admit(1, "light")
    bench.batch.withdraw(4, "light")
    bench.batch.admit(4, "light")


def test_the_last_sequence_of_a_flood_gives_its_place_to_another_client(full: Bench) -> None:
    assert full.executor.cancelled == [3]
    assert [slot.moves for slot in full.batch._running.values()] == [0, 0, 0, 1]
    full.step(Delta(3, [6], finish=CANCELLED))
    assert full.executor.ids == [0, 1, 2, 3, 6]
    assert (full.batch.running, full.batch.waiting) == (4, 3)


def test_a_sequence_that_gave_its_place_away_goes_on_where_it_was(full: Bench) -> None:
    consumer = full.statistics.live[4]
    full.step(Delta(3, [6], finish=CANCELLED))
    full.step(Delta(6, [5], finish=LENGTH))
    full.step(Delta(0, [5], finish=LENGTH))
    again = full.executor.submitted[-1]
    assert (again.request_id, again.prompt_ids) == (3, [5, 6, 7, 5, 6])
    assert again.sampling.max_new_tokens == 28
    full.step(Delta(3, [8], finish=LENGTH, cached_tokens=5))
    assert (consumer.generated_tokens, consumer.reused_tokens, consumer.reason) == (3, 0, LENGTH)


def test_a_sequence_that_gave_its_place_away_before_it_had_tokens_begins_with_its_prompt(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    for client in ("flood", "flood", "light"):
        bench.submit(client=client)
    bench.step(Delta(1, [], finish=CANCELLED))
    for each in (2, 0):
        bench.step(Delta(each, [5], finish=LENGTH))
    bench.step(Delta(1, [5], cached_tokens=2))
    assert (bench.statistics.reused_prompt_tokens, bench.statistics.live[2].reused_tokens) == (2, 2)


@pytest.mark.parametrize(
    ("deltas", "reason"),
    [
        ([Delta(3, [5] * 29), Delta(3, [], finish=CANCELLED)], LENGTH),
        ([Delta(3, [2], finish=FinishReason.STOP)], FinishReason.END_TOKEN),
    ],
)
def test_a_sequence_may_end_while_it_is_moved(full: Bench, deltas: list[Delta], reason: FinishReason) -> None:
    record = full.statistics.live[4]
    for delta in deltas:
        full.step(delta)
    assert (record.reason, record.generated_tokens) == (reason, 1 + sum(len(delta.token_ids) for delta in deltas))
    assert full.executor.ids == [0, 1, 2, 3, 6]


def test_one_round_of_places_is_given_back_at_a_time(full: Bench) -> None:
    full.submit(client="third")
    full.step(Delta(0, [5]))
    assert full.executor.cancelled == [3]
    full.step(Delta(3, [], finish=CANCELLED))
    assert full.executor.cancelled == [3, 2]


def test_what_was_being_moved_when_the_executor_was_lost_is_next(full: Bench) -> None:
    full.step(*(Delta(request_id, [5] * 4) for request_id in range(4)))
    full.batch.lose(full.executor, GenerationError("gone"))
    executor = FakeExecutor(full.executor.limits)
    full.batch.attach(executor)
    assert executor.ids == [0, 1, 2, 3]
    full.batch.process([])
    assert executor.cancelled == [3]


@pytest.mark.parametrize(("sampled", "moved"), [(True, []), (False, [3])])
def test_sequences_whose_seed_counts_keep_their_places(tokenizer: Tokenizer, sampled: bool, moved: list[int]) -> None:
    """A greedy sequence has the same tokens with any seed."""
    bench = Bench(tokenizer)
    for _ in range(5):
        bench.submit(client="flood", do_sample=sampled, seed=1)
    bench.submit(client="light")
    assert bench.executor.cancelled == moved
    bench.step(Delta(0, [5], finish=LENGTH))
    assert bench.executor.ids == [0, 1, 2, 3, 5]


def test_a_place_stays_free_for_others_once_there_were_some(full: Bench) -> None:
    full.step(Delta(3, [], finish=CANCELLED))
    full.step(Delta(6, [5], finish=LENGTH))
    assert len(full.executor.ids) == 5
    full.now += 301
    full.batch.expire(timeout=1000)
    assert full.executor.ids == [0, 1, 2, 3, 6, 3]


def test_an_iteration_that_frees_no_place_does_not_look_for_the_next_sequence(
    full: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    monkeypatch.setattr(WaitingQueue, "next", lambda *_, **__: looked.append(1))
    full.step(Delta(0, [5]))
    assert looked == []
    full.step(Delta(0, [5], finish=LENGTH))
    assert looked == [1]


def test_a_small_request_does_not_overtake_a_large_one_of_its_client_that_waits_for_memory(
    tokenizer: Tokenizer,
) -> None:
    bench = Bench(tokenizer, kv_blocks=8)
    for tokens in (30, 40, 5):  # they need 5, 6 and 2 of the blocks
        bench.submit(max_new_tokens=tokens)
    assert bench.executor.ids == [0]
    bench.step(Delta(0, [5], finish=LENGTH))
    assert bench.executor.ids == [0, 1, 2]


def test_a_client_that_comes_behind_requests_that_need_not_wait_takes_turns_with_theirs(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1, max_queue_size=100)
    for request_id in range(3):
        bench.submit(client="old")
        bench.step(Delta(request_id, [5] * 30, finish=LENGTH))
    for client in ("old", "old", "old", "late", "late", "late"):
        bench.submit(client=client)
    for request_id in (3, 6, 4, 7):
        bench.step(Delta(request_id, [5] * 30, finish=LENGTH))
    assert bench.executor.ids == [0, 1, 2, 3, 6, 4, 7, 5]


def test_a_place_that_was_to_be_given_back_in_a_lost_executor_does_not_hinder_later_ones(full: Bench) -> None:
    full.batch.cancel(next(slot.state for request_id, slot in full.batch._running.items() if request_id == 3))
    full.batch.lose(full.executor, GenerationError("gone"))
    assert not full.batch._moving


ITERATION = 0.01
LIGHT_EVERY = 0.1037
"""Seconds between two requests of the light client: they come at every point of an iteration."""
REQUESTS = 300


class FirstToken(Recorder):
    """A consumer that knows when its first token came."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self._bench = bench
        self.at: float | None = None

    def __call__(self, update: OutputChunk) -> None:
        super().__call__(update)
        if self.at is None and update.tokens:
            self.at = self._bench.now


class Engine:
    """Plays the executor of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.live: dict[int, tuple[Submit, int]] = {}
        self.cancelled: set[int] = set()
        self.tokens = 0

    def iterate(self) -> None:
        """Run an iteration, which ends now."""
        deltas = []
        for sequence_id in self.cancelled & self.live.keys():
            deltas.append(Delta(sequence_id, [], finish=FinishReason.CANCELLED))
            del self.live[sequence_id]
        for sequence_id, (request, emitted) in list(self.live.items())[: self.bench.batch.limits.max_batch_size]:
            self.tokens += 1
            done = emitted + 1 == request.sampling.max_new_tokens
            self.live[sequence_id] = (request, emitted + 1)
            deltas.append(Delta(sequence_id, [5], finish=FinishReason.LENGTH if done else None))
            if done:
                del self.live[sequence_id]
        self.bench.batch.process([step_of(deltas)])

    def take(self) -> None:
        """Take what was submitted and cancelled since."""
        self.cancelled = set(self.bench.executor.cancelled)
        self.bench.executor.cancelled.clear()
        for request in self.bench.executor.submitted:
            self.live[request.request_id] = (request, 0)
        self.bench.executor.submitted.clear()


Flood = Callable[[Bench, int], None]
"""Called before each iteration, with its number."""


def first_tokens(tokenizer: Tokenizer, flood: Flood | None, *, kv_blocks: int = 0, lookahead: int = 0) -> list[float]:
    """Seconds to the first tokens of the light client's requests, which begin after some iterations of the flood."""
    some = Bench(
        tokenizer,
        max_batch_size=16,
        max_queue_size=1000,
        max_input_len=900,
        max_output_len=900,
        max_seq_len=1000,
        kv_blocks=kv_blocks,
        lookahead=lookahead,
    )
    engine = Engine(some)
    begin = some.now + 100 * ITERATION
    arrivals = [begin + number * LIGHT_EVERY for number in range(REQUESTS)]
    waiting: list[tuple[float, FirstToken]] = []

    def arrive(now: float) -> None:
        some.now = now
        waiting.append((now, FirstToken(some)))
        some.submit([5] * 5, consumer=waiting[-1][1], max_new_tokens=5, client="light")

    iteration = 0
    while len(waiting) < REQUESTS or any(first.at is None for _, first in waiting):
        if flood is not None:
            flood(some, iteration)
        iteration += 1
        engine.take()
        if not engine.live:  # the engine begins when something comes
            arrive(max(some.now, arrivals[len(waiting)]))
            continue
        end = some.now + ITERATION
        while len(waiting) < REQUESTS and arrivals[len(waiting)] <= end:
            arrive(arrivals[len(waiting)])
        some.now = end
        engine.iterate()
    return [first.at - arrived for arrived, first in waiting if first.at is not None]


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1]


def many_sequences(bench: Bench, iteration: int) -> None:
    """60 requests of n=16 at once."""
    if not iteration:
        for _ in range(60):
            bench.submit([5] * 100, max_new_tokens=200, n=16, do_sample=True, client="flood")


def without_end(bench: Bench, iteration: int) -> None:
    """As many requests as the queue takes, all the time."""
    while True:
        try:
            bench.submit([5] * 10, max_new_tokens=50, client="flood")
        except OverloadedError:
            return


def long_ones(bench: Bench, iteration: int) -> None:
    """The longest outputs."""
    if not iteration:
        for _ in range(100):
            bench.submit([5] * 10, max_new_tokens=900, client="flood")


def with_seeds(bench: Bench, iteration: int) -> None:
    """Sequences that cannot give their places away."""
    while bench.batch.waiting < 50:
        bench.submit([5] * 10, max_new_tokens=40, do_sample=True, seed=1, n=16, client="flood")


def several(bench: Bench, iteration: int) -> None:
    """Eight clients that flood."""
    for client in "abcdefgh":
        if iteration % 10 == 0 and bench.batch.waiting < 900:
            bench.submit([5] * 50, max_new_tokens=100, n=16, do_sample=True, client=client)


FLOODS = [many_sequences, without_end, long_ones, with_seeds, several]


@pytest.mark.parametrize("flood", FLOODS)
@by_rows(("kv_blocks", "lookahead"), [(0, 0), (400, 4)])
def test_a_light_clients_first_tokens_take_less_than_twice_as_long_beside_a_flood(
    tokenizer: Tokenizer, flood: Flood, kv_blocks: int, lookahead: int
) -> None:
    alone = first_tokens(tokenizer, None, kv_blocks=kv_blocks)
    beside = first_tokens(tokenizer, flood, kv_blocks=kv_blocks, lookahead=lookahead)
    assert p99(beside) < 2 * p99(alone)


def that_leaves_room_in_the_executors_queue(bench: Bench, iteration: int) -> None:
    """Two more than there are places, and the executor queues four itself."""
    if not iteration:
        bench.submit([5] * 10, max_new_tokens=800, n=18, do_sample=True, client="flood")


@pytest.mark.parametrize("flood", [many_sequences, that_leaves_room_in_the_executors_queue])
def test_the_first_request_beside_a_flood_gets_a_place_back(tokenizer: Tokenizer, flood: Flood) -> None:
    """Not only the later ones, for which there is a reserve."""
    assert max(first_tokens(tokenizer, flood, lookahead=4)) < 3 * ITERATION


def test_a_client_alone_has_all_places_and_the_executors_queue(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=16, lookahead=3, max_queue_size=100)
    bench.submit(n=40, do_sample=True, client="a")
    assert len(bench.executor.submitted) == 16 + 3


def test_two_floods_get_equal_shares_of_the_tokens(tokenizer: Tokenizer) -> None:
    """Whatever the size of their requests."""
    bench = Bench(tokenizer, max_batch_size=8, max_queue_size=100)
    engine = Engine(bench)
    shares = {"long": 0, "short": 0}
    for _ in range(2000):
        for client, tokens in (("long", 40), ("short", 4)):
            for _ in range(4):
                try:
                    bench.submit([5] * 5, max_new_tokens=tokens, client=client, n=2, do_sample=True)
                except OverloadedError:
                    break
        engine.take()
        for request, _ in engine.live.values():
            shares["long" if request.sampling.max_new_tokens == 40 else "short"] += 1
        engine.iterate()
    # In output tokens; a share also has the prompts, which are half of what short ones get.
    assert 0.3 < shares["short"] / sum(shares.values()) < 0.5
    assert engine.tokens > 2000 * 7 * 0.9


@pytest.mark.parametrize(("priority", "order"), [(-1, [5, 8, 9]), (0, [5, 9, 8])])
def test_a_request_may_step_back_behind_those_of_its_origins_priority(
    priority: Any, order: list[int], tokenizer: Tokenizer
) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    request = GenerationRequest(prompt_ids=[9], sampling=Sampling(max_new_tokens=3), priority=priority)
    bench.batch.admit(1, "")
    bench.batch.submit(request, [9], Recorder(), None, RequestOrigin())
    bench.submit((8,))
    for request_id in order[:-1]:
        bench.step(Delta(bench.executor.ids[-1], [request_id], finish=FinishReason.LENGTH))
    assert [submitted.prompt_ids[0] for submitted in bench.executor.submitted] == order
