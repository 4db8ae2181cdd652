"""Who runs, and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
)
from djl_trtllm.executor.protocol import Delta, Refusal, Stats, Step
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, FinishReason, Origin
from tests.batching.helpers import Bench

LENGTH, END, CANCELLED, ERROR = FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED, FinishReason.ERROR


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


# -- the way in --------------------------------------------------------------------------------------------------------


def test_admission_is_refused_with_the_numbers_before_there_are_tokens(bench: Bench) -> None:
    bench.batch.admit(8)
    with pytest.raises(OverloadedError, match="8 waiting, job_queue_size is 4") as caught:
        bench.batch.admit(1)
    assert (caught.value.queue_depth, caught.value.capacity, caught.value.retry_after) == (8, 4, 2)
    bench.batch.withdraw(3)
    bench.batch.admit(3)
    bench.batch.withdraw(8)
    assert bench.batch.idle
    bench.batch.admit(8)


def test_the_batch_counts_sequences_and_not_requests(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=64, max_queue_size=64)
    bench.submit(n=20, do_sample=True)
    bench.submit(best_of=20, do_sample=True)
    bench.submit(beam_width=20)
    bench.submit(n=5, do_sample=True)
    # 20, 20, 20, and 4 of the last five.
    assert len(bench.executor.submitted) == 20 + 20 + 1 + 4
    assert (bench.batch.running, bench.batch.waiting) == (64, 1)


def test_the_executor_knows_the_request_of_each_sequence(bench: Bench) -> None:
    bench.submit(n=2, do_sample=True, origin=Origin("story-1"))
    bench.submit(origin=Origin("story-2"))
    assert [message.origin for message in bench.executor.submitted] == ["story-1", "story-1", "story-2"]


def test_what_runs_is_no_queue(bench: Bench) -> None:
    bench.submit(n=3, do_sample=True)
    bench.batch.admit(5)
    with pytest.raises(OverloadedError, match="5 waiting"):
        bench.batch.admit(1)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((), 2), ((6,), 12), ((2, 6), 8), ((0.25, 0.35), 1), ((0.0,), 1), ((15,), 30), ((14.6,), 30), ((16,), 30)],
)
def test_retry_after_is_what_the_queue_takes_within_bounds(
    bench: Bench, seconds: tuple[float, ...], expected: int
) -> None:
    for taken in seconds:
        generation, _ = bench.submit()
        bench.now += taken
        bench.step(Delta(generation.ids[0], [5], finish=LENGTH))
    bench.batch.admit(8)
    with pytest.raises(OverloadedError) as caught:
        bench.batch.admit(1)
    assert caught.value.retry_after == expected


def test_more_sequences_than_there_ever_is_room_for_are_invalid(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="9 sequences, and there is room for 8"):
        bench.batch.admit(9)
    assert bench.batch.idle


@pytest.mark.parametrize(
    ("prompt", "fields", "error"),
    [
        ([5] * 51, {}, PromptTooLongError),
        ([], {}, InvalidRequestError),
        ([5] * 30, {"max_new_tokens": 10}, PromptTooLongError),
        ([5] * 51, {"n": 3, "do_sample": True}, PromptTooLongError),
        ([5], {"beam_width": 5}, InvalidRequestError),
    ],
    ids=["prompt", "empty", "blocks", "several", "beams"],
)
def test_a_request_that_can_never_run_is_refused_and_its_room_given_back(
    tokenizer: Tokenizer, prompt: list[int], fields: dict[str, Any], error: type[Exception]
) -> None:
    bench = Bench(tokenizer, kv_blocks=4)
    with pytest.raises(error):
        bench.submit(prompt, **fields)
    assert bench.batch.idle
    assert (bench.executor.submitted, bench.statistics.requests) == ([], 0)


def test_what_was_cut_off_the_prompt_counts_nowhere(bench: Bench) -> None:
    generation, _ = bench.submit(range(10, 80), truncate=3)
    assert bench.executor.submitted[0].prompt_ids == [77, 78, 79]
    assert (generation.record.prompt_tokens, bench.statistics.prompt_tokens) == (3, 3)


def test_a_request_reaches_the_executor_with_its_adapter_and_the_length_that_fits(bench: Bench) -> None:
    adapter = Adapter("french", 3, "adapters/french")
    bench.submit([5] * 45, max_new_tokens=0, adapter=adapter)
    (message,) = bench.executor.submitted
    assert (message.sampling.max_new_tokens, message.adapter, message.stop_token_ids) == (15, adapter, [2])


# -- who runs ----------------------------------------------------------------------------------------------------------


def test_places_are_filled_in_order_and_freed_by_the_terminal_delta_only(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2)
    generations = [bench.submit()[0] for _ in range(4)]
    assert bench.executor.ids == [0, 1]
    assert (bench.batch.running, bench.batch.waiting) == (2, 2)
    bench.batch.cancel(generations[0])
    assert (bench.executor.cancelled, bench.executor.ids) == ([0], [0, 1])
    bench.step(Delta(0, [5]))
    assert bench.executor.ids == [0, 1]
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.executor.ids == [0, 1, 2]
    bench.step(Delta(1, [5], finish=LENGTH), Delta(2, [5], finish=END))
    assert bench.executor.ids == [0, 1, 2, 3]


def test_kv_blocks_are_counted_to_the_end_of_each_sequence_in_order(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=10)
    bench.submit([5] * 30, max_new_tokens=10)  # 5 blocks
    bench.submit([5] * 40, max_new_tokens=10)  # 6 blocks: waits
    bench.submit([5], max_new_tokens=1)  # 2 blocks: would fit, and does not overtake
    assert bench.executor.ids == [0]
    bench.step(Delta(0, [5], finish=LENGTH))
    assert bench.executor.ids == [0, 1, 2]


def test_the_last_block_may_be_used_and_no_more(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=10)
    for _ in range(3):
        bench.submit([5] * 30, max_new_tokens=10)  # 5 blocks each
    assert bench.executor.ids == [0, 1]


def test_blocks_come_back_with_the_terminal_delta_and_with_the_end_of_the_executor(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=5)
    for number in range(3):
        generation, _ = bench.submit([5] * 30, max_new_tokens=10)
        assert bench.executor.ids == list(range(number + 1))
        bench.batch.cancel(generation)
        bench.step(Delta(number, [], finish=CANCELLED))
    bench.submit([5] * 30, max_new_tokens=10)
    bench.batch.lose(bench.executor, GenerationError("gone"))
    bench.batch.attach(bench.executor)
    bench.submit([5] * 30, max_new_tokens=10)
    assert bench.executor.ids == [0, 1, 2, 3, 4]


def test_an_executor_may_look_ahead_and_what_it_has_ahead_of_time_waits(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2, lookahead=1)
    for _ in range(4):
        bench.submit()
    assert bench.executor.ids == [0, 1, 2]
    assert (bench.batch.running, bench.batch.waiting) == (2, 2)


# -- what comes of it --------------------------------------------------------------------------------------------------


def test_merged_iterations_are_one_update_per_sequence(bench: Bench) -> None:
    _, first = bench.submit()
    _, second = bench.submit()
    steps = [Step([Delta(0, [10 + k]), Delta(1, [20 + k])], Stats(kv_usage=k)) for k in range(3)]
    steps.append(Step([Delta(1, [30], finish=LENGTH)], Stats()))
    bench.batch.process(steps)
    assert [[token.id for token in update.tokens] for update in first.updates] == [[10, 11, 12]]
    assert [[token.id for token in update.tokens] for update in second.updates] == [[20, 21, 22, 30]]
    assert second.finished().reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("delta", "reason"),
    [
        (Delta(0, [2], finish=END), FinishReason.END_TOKEN),
        (Delta(0, [5, 9, 2], finish=END), FinishReason.END_TOKEN),
        (Delta(0, [9], finish=END), FinishReason.STOP),
        (Delta(0, [], finish=END), FinishReason.STOP),
        (Delta(0, [5], finish=LENGTH), FinishReason.LENGTH),
        (Delta(0, [], finish=CANCELLED), FinishReason.CANCELLED),
        (Delta(0, [], finish=ERROR, error="bad"), FinishReason.ERROR),
    ],
)
def test_each_end_has_its_reason(bench: Bench, delta: Delta, reason: FinishReason) -> None:
    _, consumer = bench.submit(stop_token_ids=(9,))
    bench.step(delta)
    finished = consumer.finished()
    assert finished.reason is reason
    assert bench.batch.idle
    assert bench.statistics.finished == {reason.value: 1}
    if reason is FinishReason.ERROR:
        assert isinstance(finished.error, GenerationError)
        assert str(finished.error) == "bad"
    else:
        assert finished.error is None


def test_what_the_engine_says_is_wrong_with_a_request_is_not_the_engines_failure(bench: Bench) -> None:
    _, consumer = bench.submit()
    bench.step(Delta(0, [], finish=ERROR, error=Refusal("the guide is bad")))
    assert isinstance(consumer.finished().error, InvalidRequestError)
    assert str(consumer.finished().error) == "the guide is bad"


def test_a_stop_string_ends_the_sequence_and_what_comes_after_is_thrown_away(bench: Bench) -> None:
    generation, consumer = bench.submit(stop=("wolf",), max_new_tokens=20)
    for token in bench.encode("the big wolf ran away"):
        bench.step(Delta(0, [token]))
    assert consumer.text() == "the big "
    assert (consumer.finished().reason, consumer.finished().stop_sequence) == (FinishReason.STOP, "wolf")
    assert bench.executor.cancelled == [0]
    assert generation.done
    assert bench.batch.running == 1
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.batch.idle
    assert bench.statistics.finished == {FinishReason.STOP: 1}


def test_a_stop_string_in_the_last_iteration_needs_no_cancel(bench: Bench) -> None:
    _, consumer = bench.submit(stop=("wolf",))
    bench.step(Delta(0, bench.encode("the wolf ran"), finish=LENGTH))
    assert consumer.finished().reason is FinishReason.STOP
    assert (consumer.text(), bench.executor.cancelled, bench.batch.idle) == ("the ", [], True)


def test_deltas_of_unknown_requests_are_ignored(bench: Bench) -> None:
    bench.step(Delta(99, [5], finish=LENGTH))
    assert bench.batch.idle


def test_the_engines_state_is_that_of_its_last_iteration(bench: Bench) -> None:
    assert bench.batch.engine_stats == Stats()
    bench.batch.process([Step([], Stats(running=number)) for number in (1, 2, 3)])
    assert bench.batch.engine_stats == Stats(running=3)
    bench.batch.process([])
    assert bench.batch.engine_stats == Stats(running=3)
    bench.batch.fail(GenerationError("gone"))
    assert bench.batch.engine_stats == Stats()


# -- several sequences -------------------------------------------------------------------------------------------------


def test_n_sequences_have_their_own_indices_and_ends(bench: Bench) -> None:
    generation, consumer = bench.submit(n=3, do_sample=True)
    assert len(generation.ids) == 3
    bench.step(Delta(2, [7], finish=LENGTH), Delta(0, [5], finish=END))
    done = [generation.done]
    bench.step(Delta(1, [6], finish=LENGTH))
    done.append(generation.done)
    assert done == [False, True]
    assert [consumer.ids(index) for index in range(3)] == [[5], [6], [7]]
    assert consumer.finished(0).reason is FinishReason.STOP


def test_best_of_delivers_the_best_in_order_at_the_end(bench: Bench) -> None:
    _, consumer = bench.submit(n=2, best_of=3, do_sample=True, seed=10)
    bench.step(Delta(0, [5], [-3.0], LENGTH), Delta(1, [6], [-1.0], LENGTH), Delta(2, [7], [-1.0]))
    assert consumer.updates == []
    bench.step(Delta(2, [8], [-1.0], LENGTH))
    assert [consumer.ids(0), consumer.ids(1)] == [[6], [7, 8]]
    assert [consumer.finished(index).seed for index in range(2)] == [11, 12]
    assert len(consumer.updates) == 2
    assert bench.statistics.generated_tokens == 4


def test_best_of_prefers_whole_sequences_to_failed_ones(bench: Bench) -> None:
    _, consumer = bench.submit(n=1, best_of=2, do_sample=True)
    bench.step(Delta(0, [], finish=ERROR, error="bad"), Delta(1, [6], [-5.0], LENGTH))
    assert consumer.finished().reason is FinishReason.LENGTH


def test_a_cancelled_best_of_still_ends_each_answer_once(bench: Bench) -> None:
    generation, consumer = bench.submit(n=2, best_of=3, do_sample=True)
    bench.step(Delta(0, [5], [-1.0], LENGTH))
    bench.batch.cancel(generation)
    assert consumer.finished(0).reason is FinishReason.LENGTH
    assert consumer.finished(1).reason is FinishReason.CANCELLED
