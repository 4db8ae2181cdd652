"""Counts in buckets."""

from __future__ import annotations

import time
from math import inf

import pytest

from djl_trtllm.batching.statistics import (
    FIRST_TOKEN_SECONDS,
    PER_TOKEN_SECONDS,
    PREFILL_SECONDS,
    REQUEST_SECONDS,
    Histogram,
    RequestRecord,
    Statistics,
)
from djl_trtllm.executor.protocol import Step
from djl_trtllm.logs import request_id_of
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import Adapter, FinishReason, OutputChunk, RequestOrigin, SequenceResult
from tests.batching.helpers import Bench, Recorder
from tests.support.steps import Delta, step_of

# -- The record of a request.


@pytest.mark.parametrize(("sequences", "tokens", "seconds"), [(1, 5, 2.0), (2, 10, 2.0), (1, 2, 8.0), (1, 1, None)])
def test_the_first_token_of_a_sequence_has_no_time_before_it(
    sequences: int, tokens: int, seconds: float | None
) -> None:
    record = RequestRecord(
        RequestOrigin(), 100, 3, sequences, first_token_at=106, last_token_at=114, generated_tokens=tokens
    )
    assert record.time_per_output_token == seconds
    record.first_token_at = None
    assert record.time_per_output_token is None


def test_a_request_counts_with_its_prompt_and_images_when_it_is_queued() -> None:
    statistics = Statistics("story")
    for number in (1, 2):
        record = RequestRecord(RequestOrigin(), 100, 40, 1, images=2, image_tokens=30, image_bytes=5000)
        statistics.request_queued(record)
        assert (record.number, record.model, list(statistics.live)) == (number, "story", list(range(1, number + 1)))
    assert (statistics.requests, statistics.prompt_tokens) == (2, 80)
    assert (statistics.images, statistics.image_tokens, statistics.image_bytes) == (4, 60, 10_000)


def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0, 7.0, 8.0):
        histogram.observe(value)
    histogram.observe(0.25, 4)
    assert histogram.bounds == (1.0, 2.0)
    assert histogram.counts == [6, 2, 3]
    assert histogram.sum == 30.0


def test_counts_add_up_over_all_bounds_or_over_some() -> None:
    histogram = Histogram((1.0, 2.0, 3.0))
    for value in (0.5, 1.5, 1.7, 2.5, 9.0):
        histogram.observe(value)
    assert histogram.count == 5
    assert histogram.cumulative() == [(1.0, 1), (2.0, 3), (3.0, 4), (inf, 5)]
    assert histogram.cumulative((2.0,)) == [(2.0, 3), (inf, 5)]
    with pytest.raises(KeyError):
        histogram.cumulative((2.5,))


def test_buckets_fit_their_quantity() -> None:
    statistics = Statistics()
    # As a sum of all bounds, so that a changed one is noticed: users have dashboards of these buckets.
    for histogram, bounds, finest, total in (
        (statistics.time_to_first_token, FIRST_TOKEN_SECONDS, 0.001, 3527.816),
        (statistics.inter_token_latency, PER_TOKEN_SECONDS, 0.0005, 168.579),
        (statistics.time_per_output_token, PER_TOKEN_SECONDS, 0.0005, 168.579),
        (statistics.queue_time, REQUEST_SECONDS, 0.001, 11638.991),
        (statistics.decode_time, REQUEST_SECONDS, 0.001, 11638.991),
        (statistics.inference_time, REQUEST_SECONDS, 0.001, 11638.991),
        (statistics.request_time, REQUEST_SECONDS, 0.001, 11638.991),
        (statistics.prefill_time, PREFILL_SECONDS, 0.001, 3519.441),
        (statistics.prompt_length, (1, 1_000_000), 1, 1_888_888),
        (statistics.output_length, (1, 1_000_000), 1, 1_888_888),
        (Histogram(), (), 0.001, 229.4435),
    ):
        assert set(bounds) <= set(histogram.bounds)
        assert (histogram.bounds[0], list(histogram.bounds)) == (finest, sorted(set(histogram.bounds)))
        assert sum(histogram.bounds) == pytest.approx(total)


def test_a_request_that_ends_is_in_every_histogram_of_requests() -> None:
    statistics = Statistics()
    record = RequestRecord(RequestOrigin(), 100, 40, 1)
    statistics.request_queued(record)
    statistics.request_started(record, 101)
    record.first_token_at, record.last_token_at, record.generated_tokens = 103, 107, 11
    statistics.request_ended(record, SequenceResult(FinishReason.STOP, 11, None, None), 108)
    names = ("queue_time", "prefill_time", "decode_time", "inference_time", "request_time", "time_per_output_token")
    histograms = [getattr(statistics, name) for name in (*names, "prompt_length", "output_length")]
    assert [histogram.sum for histogram in histograms] == [1, 2, 4, 6, 8, 0.4, 40, 11]
    assert [histogram.count for histogram in histograms] == [1] * 8
    assert statistics.ended_requests == {FinishReason.STOP: 1}


def test_a_request_that_never_ran_has_only_the_times_that_it_has() -> None:
    statistics = Statistics()
    record = RequestRecord(RequestOrigin(), 100, 40, 1)
    statistics.request_queued(record)
    assert (statistics.images, statistics.image_tokens, statistics.image_bytes) == (0, 0, 0)
    statistics.request_ended(record, SequenceResult(FinishReason.CANCELLED, 0, None, None), 108)
    assert (statistics.request_time.sum, statistics.output_length.count) == (8, 1)
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert getattr(statistics, name).count == 0


# -- What the rolling batch counts.


LENGTH = FinishReason.LENGTH


@pytest.mark.parametrize(
    ("iterations", "gaps"),
    [
        # Every token but the first has a gap, and together they are the time from the first to the last.
        ([(6, 2, 0), (6, 1, 0), (6, 3, 0)], {0.0005: 1, 2.5: 3, 7.5: 1}),
        ([(1, 1, 1), (2, 1, 0), (3, 0, 1)], {2.5: 1, 5.0: 1}),
        ([(0, 3, 2), (2, 1, 1)], {0.0005: 3, 2.5: 2}),
        ([(1, 0, 0), (2, 1, 0)], {}),
    ],
)
def test_tokens_that_arrive_together_share_the_time_since_those_before_them(
    tokenizer: Tokenizer, iterations: list[tuple[int, int, int]], gaps: dict[float, int]
) -> None:
    """An iteration: seconds before it, and the new tokens of two sequences."""
    bench = Bench(tokenizer)
    bench.submit(n=2, do_sample=True)
    record, last, total, began = bench.statistics.live[1], [0.0, 0.0], 0.0, 0.0
    for seconds, *tokens in iterations:
        bench.now += seconds
        bench.step(*(Delta(number, [5] * count) for number, count in enumerate(tokens)))
        for number, count in enumerate(tokens):
            if count:
                began = began or bench.now
                total += bench.now - (last[number] or bench.now)
                last[number] = bench.now
    seen = bench.statistics.inter_token_latency
    assert {bound: count for bound, count in zip(seen.bounds, seen.counts, strict=False) if count} == gaps
    assert (bench.statistics.queue_time.count, bench.statistics.time_to_first_token.count) == (1, 1)
    assert (seen.sum, bench.statistics.time_to_first_token.sum) == (total, began - 100)
    assert (record.first_token_at, record.last_token_at) == (began, max(last))
    assert record.generated_tokens == bench.statistics.generated_tokens == sum(sum(each[1:]) for each in iterations)


def test_what_a_stop_string_cut_off_does_not_count(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(stop=("wolf",))
    bench.step(Delta(0, bench.encode("the wolf went away")))
    (record,) = bench.statistics.ended
    assert record.generated_tokens == bench.statistics.generated_tokens < len(bench.encode("the wolf went away"))


def test_a_request_is_recorded_from_the_queue_to_its_end(tokenizer: Tokenizer) -> None:
    bench, begun = Bench(tokenizer, max_batch_size=1), time.time()
    assert bench.statistics.last_request_at == 0
    bench.submit()
    assert begun <= bench.statistics.last_request_at <= time.time()
    bench.now += 1
    bench.submit(origin=RequestOrigin("asked-7", "lmi"), adapter=Adapter("french", 1, "/french"))
    record = bench.statistics.live[2]
    assert (record.arrived, record.started) == (101, None)
    assert (record.number, record.model, record.adapter) == (2, "story", "french")
    assert (record.origin.request_id, record.origin.dialect) == ("asked-7", "lmi")
    bench.now += 1
    bench.step(Delta(0, [5], finish=LENGTH))
    assert (record.started, record.first_token_at) == (102, None)
    bench.now += 1
    bench.step(Delta(1, [5], cached_tokens=2))
    bench.now += 1
    bench.step(Delta(1, [6]))
    assert bench.statistics.live == {2: record}
    assert (record.ended, record.reason) == (None, None)
    bench.now += 1
    bench.step(Delta(1, [], finish=LENGTH))
    assert (record.first_token_at, record.last_token_at, record.ended) == (103, 104, 105)
    assert (record.prompt_tokens, record.reused_tokens, record.generated_tokens, record.sequences) == (3, 2, 2, 1)
    assert (record.reason, record.error, record.resumes) == (LENGTH, None, 0)
    assert ([each.number for each in bench.statistics.ended], bench.statistics.live) == ([1, 2], {})


def test_the_worst_end_of_its_sequences_is_that_of_the_request(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(n=3, do_sample=True)
    bench.step(Delta(0, [5], finish=LENGTH))
    bench.step(Delta(1, [], finish=FinishReason.ERROR, error="broken"))
    assert not bench.statistics.ended
    bench.step(Delta(2, [5], finish=LENGTH))
    (record,) = bench.statistics.ended
    assert (record.reason, record.error) == (FinishReason.ERROR, "GenerationError")


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_request_whose_consumer_fails_at_its_end_ends_once(tokenizer: Tokenizer, sequences: int) -> None:
    class Failing(Recorder):
        def __call__(self, update: OutputChunk) -> None:
            raise RuntimeError("broken")

    bench = Bench(tokenizer)
    bench.submit(consumer=Failing(), n=sequences, do_sample=True)
    bench.step(Delta(0, [5], finish=LENGTH))
    (record,) = bench.statistics.ended
    assert (bench.statistics.live, sum(bench.statistics.request_time.counts)) == ({}, 1)
    assert bench.statistics.finished.total() == sequences
    assert record.reason is (LENGTH if sequences == 1 else FinishReason.CANCELLED)


def test_the_last_512_requests_are_remembered(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    for number in range(514):
        bench.submit()
        bench.step(Delta(number, [5], finish=LENGTH))
    assert [record.number for record in bench.statistics.ended] == list(range(3, 515))


def test_observers_get_the_record_of_each_request_that_ends(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tokenizer)
    seen: list[RequestRecord] = []

    def fail(record: RequestRecord) -> None:
        raise RuntimeError("broken")

    bench.statistics.observers += [fail, seen.append]
    bench.submit(origin=RequestOrigin("asked-7", "lmi"))
    bench.step(Delta(0, [5], finish=LENGTH))
    assert seen == list(bench.statistics.ended)
    assert seen[0].ended is not None
    assert [request_id_of(line) for line in caplog.records] == ["asked-7"]


def test_tokens_of_drafts_count_with_their_request_but_those_behind_a_stop_string(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    _, plain = bench.submit()
    _, stopped = bench.submit(stop=(tokenizer.decode([300]),), n=1)
    step = step_of([Delta(0, [5, 6, 7], finish=LENGTH), Delta(1, [8, 300, 9, 10])])
    step.accepted.update({0: 2, 1: 3, 77: 5})
    bench.batch.process([step])
    assert (plain.finished().accepted_tokens, stopped.finished().accepted_tokens) == (2, 2)
    assert bench.statistics.accepted_tokens == 4
    (record,) = [each for each in bench.statistics.ended if each.number == 1]
    assert record.accepted_tokens == 2
    bench.submit()
    bench.step(Delta(2, [5], finish=LENGTH))
    assert bench.statistics.ended[-1].accepted_tokens is None


def test_an_engine_may_say_at_the_end_how_many_tokens_drafts_have_proposed(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    _, consumer = bench.submit(max_new_tokens=9)
    for _ in range(2):
        bench.step(Delta(0, [5, 6, 7, 8]))
    step = step_of([Delta(0, [5], finish=LENGTH)])
    step.accepted[0] = 6
    bench.batch.process([step])
    assert (consumer.finished().accepted_tokens, bench.statistics.accepted_tokens) == (6, 6)


def test_what_drafts_proposed_is_known_of_requests_whose_sequences_all_say_so(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    consumers = [bench.submit(n=2, max_new_tokens=9)[1] for _ in range(2)]
    bench.step(Delta(0, [5]), Delta(1, [5]), Delta(2, [5]), Delta(3, [5]))
    step = Step()
    for request_id, drafted in ((0, 6), (1, 4), (2, 6), (3, None)):
        step.end(request_id, LENGTH, None, drafted)
    bench.batch.process([step])
    assert [record.drafted_tokens for record in bench.statistics.ended] == [10, None]
    assert [consumers[0].finished(index).drafted_tokens for index in (0, 1)] == [6, 4]


def test_what_comes_behind_a_stop_string_is_of_no_draft(tokenizer: Tokenizer) -> None:
    bench = Bench(tokenizer)
    bench.submit(stop=(tokenizer.decode([300]),), max_new_tokens=20)
    steps = [step_of([Delta(0, tokens)]) for tokens in ([4, 5, 6], [300, 7, 8], [9, 10, 11])]
    for step in steps:
        step.accepted[0] = 2
    bench.batch.process(steps)
    assert bench.statistics.accepted_tokens == 3
