"""A light client beside floods of every kind, on a played clock.

The engine is played too: an iteration takes `ITERATION` seconds and gives each sequence that has a place a token; what
comes during an iteration takes part in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from djl_trtllm.errors import OverloadedError
from djl_trtllm.executor.protocol import Delta, Stats, Step, Submit
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, OutputChunk
from tests.batching.helpers import Bench, Recorder

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
        self.bench.batch.process([Step(deltas, Stats())])

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
    submitted = 0
    iteration = 0
    while submitted < REQUESTS or any(first.at is None for _, first in waiting):
        if flood is not None:
            flood(some, iteration)
        iteration += 1
        engine.take()
        if not engine.live:  # the engine begins when something comes
            some.now = max(some.now, arrivals[submitted])
            waiting.append((some.now, FirstToken(some)))
            some.submit([5] * 5, consumer=waiting[-1][1], max_new_tokens=5, client="light")
            submitted += 1
            continue
        end = some.now + ITERATION
        while submitted < REQUESTS and arrivals[submitted] <= end:
            some.now = arrivals[submitted]
            waiting.append((some.now, FirstToken(some)))
            some.submit([5] * 5, consumer=waiting[-1][1], max_new_tokens=5, client="light")
            submitted += 1
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


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.__name__)
@pytest.mark.parametrize(("kv_blocks", "lookahead"), [(0, 0), (400, 4)])
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
