"""Requests whose executor is lost go on in the next one."""

from __future__ import annotations

import pytest

from djl_trtllm.batching.rolling_batch import Loss
from djl_trtllm.errors import GenerationError
from djl_trtllm.executor.protocol import Delta, Limits
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason
from tests.batching.helpers import Bench, FakeExecutor

LENGTH, CANCELLED, ERROR = FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.ERROR
GONE = GenerationError("gone")


def bench_of(tokenizer: Tokenizer, **options: int) -> Bench:
    return Bench(tokenizer, **{"max_resumes": 2, **options})  # type: ignore[arg-type]


def replaced(bench: Bench) -> Loss:
    """Lose the executor, and get another one."""
    loss = bench.batch.lose(bench.executor, GONE)
    attach(bench)
    return loss


def attach(bench: Bench) -> FakeExecutor:
    """Another executor; the one before."""
    old, bench.executor = bench.executor, FakeExecutor(bench.executor.limits)
    bench.batch.attach(bench.executor)
    return old


def test_prompt_and_tokens_are_the_new_prompt(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    generation, consumer = bench.submit(max_new_tokens=4)
    bench.step(Delta(0, [8, 9]))
    assert replaced(bench) == Loss(resumed=1, ended=0, blamed=False)
    (message,) = bench.executor.submitted
    assert (message.prompt_ids, message.sampling.max_new_tokens) == ([5, 6, 7, 8, 9], 2)
    bench.step(Delta(0, [10]), Delta(0, [11], finish=LENGTH))
    assert consumer.ids() == [8, 9, 10, 11]
    assert consumer.finished().generated_tokens == 4
    assert (generation.record.resumes, bench.statistics.resumed, bench.batch.idle) == (1, 1, True)


def test_text_and_stop_strings_go_on_across_the_loss(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the big bad wolf went on and on", False)
    bench = bench_of(tokenizer)
    _, consumer = bench.submit(stop=("wolf went",))
    at = next(at for at in range(len(ids)) if tokenizer.decode(ids[:at]).endswith("wolf"))
    bench.step(Delta(0, ids[:at]))
    assert "wolf" not in consumer.text()
    replaced(bench)
    bench.step(Delta(0, ids[at:]))
    assert consumer.text().rstrip() == "the big bad"
    assert (consumer.finished().reason, consumer.finished().stop_sequence) == (FinishReason.STOP, "wolf went")
    assert bench.executor.cancelled == [0]


def test_a_character_may_be_half_finished(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é", False)
    bench = bench_of(tokenizer)
    _, consumer = bench.submit()
    for id_ in ids:
        bench.step(Delta(0, [id_]))
        if id_ != ids[-1]:
            assert replaced(bench).ended == 0
    bench.step(Delta(0, [], finish=LENGTH))
    assert consumer.text() == tokenizer.decode(ids)


def test_log_probabilities_add_up_across_the_loss(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    _, consumer = bench.submit(logprobs=True)
    bench.step(Delta(0, [8], [-0.5]))
    replaced(bench)
    assert bench.executor.submitted[0].logprobs
    bench.step(Delta(0, [9], [-0.25], LENGTH))
    assert consumer.finished().cumulative_logprob == -0.75


def test_the_lost_come_before_those_that_wait_and_in_their_order(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, max_batch_size=2)
    for _ in range(4):
        bench.submit()
    bench.step(Delta(0, [8]), Delta(1, [8]))
    bench.batch.lose(bench.executor, GONE)
    assert (bench.batch.running, bench.batch.waiting) == (0, 4)
    attach(bench)
    assert bench.executor.ids == [0, 1]
    bench.step(Delta(0, [8], finish=LENGTH), Delta(1, [8], finish=LENGTH))
    assert bench.executor.ids == [0, 1, 2, 3]


def test_nothing_starts_while_there_is_no_executor_and_requests_may_come(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    bench.batch.lose(bench.executor, GONE)
    generation, consumer = bench.submit()
    assert (bench.executor.ids, bench.batch.waiting) == ([], 1)
    bench.batch.cancel(generation)
    assert (consumer.finished().reason, bench.batch.idle) == (CANCELLED, True)
    bench.submit()
    attach(bench)
    assert bench.executor.ids == [1]


def test_one_that_was_lost_is_cancelled_at_once(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    generation, consumer = bench.submit()
    bench.step(Delta(0, [8]))
    bench.batch.lose(bench.executor, GONE)
    bench.batch.cancel(generation)
    assert (consumer.finished().reason, consumer.ids(), bench.batch.idle) == (CANCELLED, [8], True)
    attach(bench)
    assert bench.executor.ids == []


def test_the_deadline_counts_from_the_arrival(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    _, consumer = bench.submit()
    bench.step(Delta(0, [8]))
    bench.now += 8
    bench.batch.lose(bench.executor, GONE)
    bench.now += 3
    bench.batch.expire(10)
    assert "predict_timeout" in str(consumer.finished().error)


def test_what_cannot_go_on_ends_with_the_error_and_all_its_sequences(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, max_batch_size=2)
    _, penalised = bench.submit(n=3, do_sample=True, presence_penalty=0.5)
    bench.step(Delta(0, [8]))
    assert replaced(bench) == Loss(resumed=0, ended=1, blamed=False)
    assert [penalised.finished(index).error for index in range(3)] == [GONE] * 3
    assert (bench.executor.ids, bench.batch.idle) == ([], True)


def test_a_penalised_one_without_tokens_begins_again(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    bench.submit(presence_penalty=0.5)
    assert replaced(bench).resumed == 1
    assert bench.executor.ids == [0]


def test_beams_without_tokens_begin_again(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    _, consumer = bench.submit(beam_width=2, n=2, max_new_tokens=1)
    assert replaced(bench).resumed == 1
    assert [message.sampling.beam_width for message in bench.executor.submitted] == [2]
    bench.step(Delta(0, [8], finish=LENGTH), Delta(1, [9], finish=LENGTH))
    assert [consumer.ids(index) for index in range(2)] == [[8], [9]]


def test_ranked_sequences_keep_what_they_have(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    _, consumer = bench.submit(best_of=2, do_sample=True, max_new_tokens=2)
    bench.step(Delta(0, [8, 8], [-0.5, -0.5], LENGTH), Delta(1, [9], [-0.1]))
    replaced(bench)
    assert bench.executor.ids == [1]
    bench.step(Delta(1, [9], [-0.1], LENGTH))
    assert consumer.ids() == [9, 9]
    assert consumer.finished().cumulative_logprob == pytest.approx(-0.2)


def test_a_cancelled_one_that_the_engine_had_not_ended_is_over(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    generation, consumer = bench.submit()
    bench.batch.cancel(generation)
    assert replaced(bench) == Loss(0, 0, False)
    assert (consumer.finished().reason, bench.batch.idle, bench.executor.ids) == (CANCELLED, True, [])


def test_one_that_has_all_its_tokens_is_over(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    _, consumer = bench.submit(max_new_tokens=2)
    bench.step(Delta(0, [8, 9]))
    assert replaced(bench) == Loss(0, 0, False)
    assert (consumer.finished().reason, bench.batch.idle, bench.executor.ids) == (LENGTH, True, [])


def test_a_request_goes_on_so_many_times_and_is_then_blamed(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, max_resumes=2)
    _, old = bench.submit()
    assert [replaced(bench) for _ in range(2)] == [Loss(1, 0, False)] * 2
    _, young = bench.submit()
    assert replaced(bench) == Loss(resumed=1, ended=1, blamed=True)
    assert (old.finished().error, young.updates) == (GONE, [])


def test_without_resuming_what_runs_ends_and_what_waits_stays(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, max_batch_size=1, max_resumes=0)
    _, running = bench.submit()
    bench.submit()
    assert replaced(bench) == Loss(resumed=0, ended=1, blamed=False)
    assert running.finished().error is GONE
    assert bench.executor.ids == [1]


def test_blocks_are_those_of_the_executor(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, kv_blocks=5)
    bench.submit([5] * 30, max_new_tokens=10)
    bench.step(Delta(0, [8]))
    replaced(bench)
    bench.submit([5] * 30, max_new_tokens=10)
    assert bench.executor.ids == [0]
    bench.step(Delta(0, [], finish=LENGTH))
    assert bench.executor.ids == [0, 1]


def test_reused_prompt_tokens_are_counted_once(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    bench.submit()
    bench.step(Delta(0, [8], cached_tokens=2))
    replaced(bench)
    bench.step(Delta(0, [9], cached_tokens=4))
    assert bench.statistics.reused_prompt_tokens == 2


# -- two executors at a time -------------------------------------------------------------------------------------------


def test_sequences_end_where_they_run_and_new_ones_start_in_the_newest(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, max_batch_size=1)
    old_generation, consumer = bench.submit()
    bench.submit()
    old = attach(bench)
    assert (old.ids, bench.executor.ids) == ([0], [1])
    assert (bench.batch.running_in(old), bench.batch.running_in(bench.executor)) == (1, 1)
    assert (bench.batch.submitted, bench.batch.running, bench.batch.waiting) == (1, 1, 1)
    bench.step(Delta(0, [8]))
    bench.batch.cancel(old_generation)
    assert (old.cancelled, bench.executor.cancelled) == ([0], [])
    bench.step(Delta(0, [], finish=CANCELLED))
    assert (consumer.finished().reason, bench.batch.running_in(old)) == (CANCELLED, 0)


def test_what_an_old_executor_loses_goes_on_in_the_newest(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    bench.submit()
    old = attach(bench)
    bench.submit()
    assert bench.batch.lose(old, GONE).resumed == 1
    assert bench.executor.ids == [1, 0]


def test_while_it_is_held_nothing_starts(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer)
    _, running = bench.submit(max_new_tokens=1)
    bench.batch.hold()
    bench.submit()
    assert bench.executor.ids == [0]
    bench.step(Delta(0, [8], finish=LENGTH))
    assert running.finished().reason is LENGTH
    old = attach(bench)
    assert (old.ids, bench.executor.ids) == ([0], [1])


def test_the_newest_executors_limits_count(tokenizer: Tokenizer) -> None:
    bench = bench_of(tokenizer, kv_blocks=5)
    bench.batch.attach(FakeExecutor(Limits(4, 50, 10, 60)))
    for _ in range(2):
        bench.submit([5] * 30, max_new_tokens=10)
    assert bench.batch.running == 2
