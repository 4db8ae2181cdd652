"""Several clients: admission, places that are given back, and what is counted meanwhile."""

from __future__ import annotations

import pytest

from djl_trtllm.batching.waiting_queue import WaitingQueue
from djl_trtllm.errors import GenerationError, OverloadedError
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from tests.batching.helpers import Bench, FakeExecutor

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
    bench.batch.admit(1, "light")


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


def test_a_sequence_that_ends_while_it_is_moved_has_ended(full: Bench) -> None:
    record = full.statistics.live[4]
    full.step(Delta(3, [2], finish=FinishReason.STOP))
    assert record.reason is FinishReason.END_TOKEN
    assert full.executor.ids == [0, 1, 2, 3, 6]


def test_a_sequence_that_has_its_last_token_while_it_is_moved_is_complete(full: Bench) -> None:
    record = full.statistics.live[4]
    full.step(Delta(3, [5] * 29))
    full.step(Delta(3, [], finish=CANCELLED))
    assert (record.reason, record.generated_tokens) == (LENGTH, 30)


def test_a_client_that_leaves_while_its_sequence_is_moved_is_gone(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    bench.submit(client="flood")
    state, _ = bench.submit(client="flood")
    bench.submit(client="light")
    bench.batch.cancel(state)
    bench.step(Delta(1, [], finish=CANCELLED))
    assert (bench.executor.ids, bench.batch.waiting) == ([0, 1, 2], 0)


def test_one_round_of_places_is_given_back_at_a_time(full: Bench) -> None:
    full.submit(client="third")
    full.step(Delta(0, [5]))
    assert full.executor.cancelled == [3]
    full.step(Delta(3, [], finish=CANCELLED))
    assert full.executor.cancelled == [3, 2]


def test_what_was_being_moved_when_the_executor_was_lost_is_next(full: Bench) -> None:
    full.batch.limits.__dict__["max_resumes"] = 1
    full.batch.lose(full.executor, GenerationError("gone"))
    executor = FakeExecutor(full.executor.limits)
    full.batch.attach(executor)
    assert executor.ids == [0, 1, 2, 3]
    full.batch.process([])
    assert executor.cancelled == [3]


def test_sequences_that_cannot_move_keep_their_places(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for _ in range(5):
        bench.submit(client="flood", do_sample=True, seed=1)
    bench.submit(client="light")
    assert bench.executor.cancelled == []
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
    monkeypatch.setattr(WaitingQueue, "next", lambda *_: looked.append(1))
    full.step(Delta(0, [5]))
    assert looked == []
    full.step(Delta(0, [5], finish=LENGTH))
    assert looked == [1]


def test_a_higher_priority_goes_first(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    for priority in (0, 0, 1):
        bench.submit(priority=priority)
    bench.step(Delta(0, [5], finish=LENGTH))
    assert bench.executor.ids == [0, 2]


def test_a_place_that_was_to_be_given_back_in_a_lost_executor_does_not_hinder_later_ones(full: Bench) -> None:
    full.batch.cancel(next(slot.state for request_id, slot in full.batch._running.items() if request_id == 3))
    full.batch.lose(full.executor, GenerationError("gone"))
    assert not full.batch._moving
