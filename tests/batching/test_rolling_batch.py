from __future__ import annotations

import pytest

from djl_trtllm.batching import FinishReason, Update
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    RequestTimeoutError,
)
from djl_trtllm.executor.protocol import Delta, Finish, Stats, Step
from djl_trtllm.model import Tokenizer

from .helpers import Bench, Recorder

LENGTH, END, CANCELLED, ERROR = Finish.LENGTH, Finish.END, Finish.CANCELLED, Finish.ERROR


@pytest.fixture
def bench(tokenizer: Tokenizer) -> Bench:
    return Bench(tokenizer)


# -- the way in --------------------------------------------------------------------------------------------------------


def test_admission_is_refused_with_the_numbers_before_there_are_tokens(bench: Bench) -> None:
    bench.batch.admit(8)
    with pytest.raises(OverloadedError, match="8 waiting, job_queue_size is 4") as caught:
        bench.batch.admit(1)
    assert (caught.value.queue_depth, caught.value.capacity, caught.value.retry_after) == (8, 4, 2)
    bench.batch.withdraw(8)
    assert bench.batch.idle
    bench.batch.admit(8)


def test_retry_after_follows_how_long_requests_take(bench: Bench) -> None:
    generation, _ = bench.submit()
    bench.now += 6
    bench.step(Delta(*generation.ids, [5], finish=LENGTH))
    bench.batch.admit(8)
    with pytest.raises(OverloadedError) as caught:
        bench.batch.admit(1)
    assert caught.value.retry_after == 12


def test_more_sequences_than_there_ever_is_room_for_are_invalid(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="9 sequences, and there is room for 8"):
        bench.batch.admit(9)
    assert bench.batch.idle


@pytest.mark.parametrize(
    ("prompt", "tokens", "numbers"),
    [
        (51, 5, ("51 tokens", "max_input_len is 50")),
        (45, 16, ("45 tokens", "max_new_tokens is 16", "60", "15 are left")),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(
    bench: Bench, prompt: int, tokens: int, numbers: tuple[str, ...]
) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        bench.submit([5] * prompt, max_new_tokens=tokens)
    assert all(number in str(caught.value) for number in numbers)
    assert bench.batch.idle


def test_a_request_that_never_fits_the_kv_cache_is_refused(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=4)
    with pytest.raises(PromptTooLongError, match="need 5 KV cache blocks, the engine has 4"):
        bench.submit([5] * 30, max_new_tokens=10)
    assert bench.batch.idle


def test_an_empty_prompt_is_refused(bench: Bench) -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        bench.submit([])
    assert bench.batch.idle


def test_truncation_keeps_the_end_of_the_prompt(bench: Bench) -> None:
    bench.submit(range(10, 80), truncate=3)
    assert bench.executor.submitted[0].prompt_ids == [77, 78, 79]


def test_no_length_means_what_fits_up_to_max_output_len(bench: Bench) -> None:
    bench.submit([5] * 3, max_new_tokens=0)
    bench.submit([5] * 45, max_new_tokens=0)
    assert [request.sampling.max_new_tokens for request in bench.executor.submitted] == [20, 15]


def test_end_ids_are_stop_ids_unless_they_are_ignored(bench: Bench) -> None:
    bench.submit(stop_token_ids=(9,))
    bench.submit(stop_token_ids=(9,), ignore_eos=True)
    assert [set(request.stop_token_ids) for request in bench.executor.submitted] == [{2, 9}, {9}]


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


def test_an_executor_may_look_ahead(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=2, lookahead=1)
    for _ in range(4):
        bench.submit()
    assert bench.executor.ids == [0, 1, 2]


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
        (Delta(0, [2], finish=END), FinishReason.EOS_TOKEN),
        (Delta(0, [9], finish=END), FinishReason.STOP_SEQUENCE),
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


def test_a_stop_string_ends_the_sequence_and_what_comes_after_is_thrown_away(bench: Bench) -> None:
    generation, consumer = bench.submit(stop=("wolf",), max_new_tokens=20)
    for token in bench.encode("the big wolf ran away"):
        bench.step(Delta(0, [token]))
    assert consumer.text() == "the big "
    assert (consumer.finished().reason, consumer.finished().stop_sequence) == (FinishReason.STOP_SEQUENCE, "wolf")
    assert bench.executor.cancelled == [0]
    assert generation.done
    assert bench.batch.running == 1
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.batch.idle
    assert bench.statistics.finished == {"stop_sequence": 1}


def test_a_stop_string_in_the_last_iteration_needs_no_cancel(bench: Bench) -> None:
    _, consumer = bench.submit(stop=("wolf",))
    bench.step(Delta(0, bench.encode("the wolf ran"), finish=LENGTH))
    assert consumer.finished().reason is FinishReason.STOP_SEQUENCE
    assert (consumer.text(), bench.executor.cancelled, bench.batch.idle) == ("the ", [], True)


def test_deltas_of_unknown_requests_are_ignored(bench: Bench) -> None:
    bench.step(Delta(99, [5], finish=LENGTH))
    assert bench.batch.idle


# -- cancelling --------------------------------------------------------------------------------------------------------


def test_a_waiting_request_is_cancelled_at_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    waiting, consumer = bench.submit()
    bench.batch.cancel(waiting)
    assert consumer.finished().reason is FinishReason.CANCELLED
    assert (bench.batch.waiting, bench.batch.running, bench.executor.cancelled) == (0, 1, [])


def test_a_cancelled_head_of_the_queue_lets_the_next_in(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, kv_blocks=10)
    bench.submit([5] * 40, max_new_tokens=10)
    large, _ = bench.submit([5] * 40, max_new_tokens=10)
    bench.submit([5], max_new_tokens=1)
    assert bench.executor.ids == [0]
    bench.batch.cancel(large)
    assert bench.executor.ids == [0, 2]


def test_cancelling_twice_and_after_the_end_does_nothing(bench: Bench) -> None:
    generation, consumer = bench.submit()
    bench.step(Delta(0, [5]))
    bench.batch.cancel(generation)
    bench.batch.cancel(generation)
    bench.step(Delta(0, [6]), Delta(0, [], finish=CANCELLED))
    bench.batch.cancel(generation)
    assert bench.executor.cancelled == [0]
    assert consumer.finished().reason is FinishReason.CANCELLED
    assert consumer.ids() == [5]
    assert bench.statistics.finished == {"cancelled": 1}
    assert bench.batch.idle


def test_a_request_that_ends_while_its_cancel_is_under_way_is_cancelled_once(bench: Bench) -> None:
    generation, consumer = bench.submit()
    bench.batch.cancel(generation)
    bench.step(Delta(0, [5], finish=LENGTH))
    assert consumer.finished().reason is FinishReason.CANCELLED
    assert bench.batch.idle


def test_late_requests_expire_and_others_do_not(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    _, running = bench.submit()
    _, waiting = bench.submit()
    bench.now += 8
    _, young = bench.submit()
    bench.now += 3
    bench.batch.expire(10)
    for consumer in (running, waiting):
        assert consumer.finished().reason is FinishReason.ERROR
        assert isinstance(consumer.finished().error, RequestTimeoutError)
    assert young.updates == []
    assert bench.executor.cancelled == [0]
    bench.batch.expire(10)
    bench.step(Delta(0, [], finish=CANCELLED))
    assert bench.executor.ids == [0, 2]


def test_a_failed_executor_ends_every_request_once(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=3)
    consumers = [bench.submit(n=2, do_sample=True)[1] for _ in range(3)]
    gone, cancelled = bench.submit()
    bench.batch.cancel(gone)
    bench.step(Delta(0, [5]), Delta(1, [5], finish=LENGTH))
    error = GenerationError("gone")
    bench.batch.fail(error)
    assert bench.batch.idle
    ends = [consumer.finished(index) for consumer in consumers for index in range(2)]
    assert [end.reason for end in ends] == [FinishReason.ERROR, FinishReason.LENGTH, *[FinishReason.ERROR] * 4]
    assert all(end.error is error for end in ends if end.reason is FinishReason.ERROR)
    assert cancelled.finished().reason is FinishReason.CANCELLED
    bench.batch.fail(error)
    bench.step(Delta(0, [5], finish=LENGTH))
    assert sum(bench.statistics.finished.values()) == 7


# -- several sequences -------------------------------------------------------------------------------------------------


def test_n_sequences_have_their_own_indices_and_ends(bench: Bench) -> None:
    generation, consumer = bench.submit(n=3, do_sample=True)
    assert len(generation.ids) == 3
    bench.step(Delta(2, [7], finish=LENGTH), Delta(0, [5], finish=END))
    assert not generation.done
    bench.step(Delta(1, [6], finish=LENGTH))
    assert generation.done
    assert [consumer.ids(index) for index in range(3)] == [[5], [6], [7]]
    assert consumer.finished(0).reason is FinishReason.STOP_SEQUENCE


def test_seeds_count_up_from_the_given_one(bench: Bench) -> None:
    bench.submit(n=3, do_sample=True, seed=2**64 - 2)
    assert [request.sampling.seed for request in bench.executor.submitted] == [2**64 - 2, 2**64 - 1, 0]


def test_unseeded_requests_differ_and_greedy_ones_have_no_seed(bench: Bench) -> None:
    bench.submit(do_sample=True)
    bench.submit(do_sample=True)
    _, greedy = bench.submit(seed=7)
    seeds = [request.sampling.seed for request in bench.executor.submitted]
    assert seeds[0] != seeds[1]
    bench.step(Delta(2, [5], finish=LENGTH))
    assert greedy.finished().seed is None


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


# -- a consumer that raises --------------------------------------------------------------------------------------------


class Broken(Recorder):
    def __call__(self, update: Update) -> None:
        super().__call__(update)
        raise ZeroDivisionError


@pytest.mark.parametrize("finish", [0, LENGTH])
def test_a_consumer_that_raises_is_cancelled_and_disturbs_nobody(bench: Bench, finish: int) -> None:
    generation, broken = bench.submit(n=2, do_sample=True, consumer=Broken())
    _, other = bench.submit()
    bench.step(Delta(0, [5], finish=finish), Delta(1, [6]), Delta(2, [7]))
    assert len(broken.updates) == 1
    assert generation.done
    assert other.ids() == [7]
    assert bench.executor.cancelled == ([1] if finish else [0, 1])
    bench.step(Delta(1, [], finish=CANCELLED), Delta(2, [8], finish=LENGTH))
    if not finish:
        bench.step(Delta(0, [], finish=CANCELLED))
    assert other.finished().reason is FinishReason.LENGTH
    assert bench.batch.idle


def test_consumers_that_raise_do_not_stop_a_failure_from_reaching_the_others(bench: Bench) -> None:
    bench.submit(n=2, do_sample=True, consumer=Broken())
    _, other = bench.submit()
    bench.batch.fail(GenerationError("gone"))
    assert other.finished().reason is FinishReason.ERROR
    assert bench.batch.idle


# -- statistics --------------------------------------------------------------------------------------------------------


def test_times_are_measured_on_the_clock(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer, max_batch_size=1)
    bench.submit()
    bench.submit()
    bench.now += 2
    bench.step(Delta(0, [5]))
    bench.now += 3
    bench.step(Delta(0, [6, 7, 8], finish=LENGTH, cached_tokens=2))
    statistics = bench.statistics
    assert (statistics.requests, statistics.prompt_tokens, statistics.generated_tokens) == (2, 6, 4)
    assert statistics.reused_prompt_tokens == 2
    assert statistics.time_to_first_token.sum == 2
    assert (statistics.inter_token_latency.sum, sum(statistics.inter_token_latency.counts)) == (3, 3)
    assert (statistics.queue_time.sum, sum(statistics.queue_time.counts)) == (5, 2)
    assert (statistics.request_time.sum, sum(statistics.request_time.counts)) == (5, 1)
