"""Counts in buckets."""

from __future__ import annotations

from math import inf

import pytest

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.statistics import (
    FIRST_TOKEN_SECONDS,
    PER_TOKEN_SECONDS,
    PREFILL_SECONDS,
    REQUEST_SECONDS,
    Histogram,
    Statistics,
)
from djl_trtllm.request import FinishReason, Origin, SequenceResult


def test_a_value_counts_in_the_first_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0, 7.0, 8.0):
        histogram.observe(value)
    assert histogram.bounds == (1.0, 2.0)
    assert histogram.counts == [2, 2, 3]
    assert histogram.sum == 29.0


def test_a_value_may_count_several_times() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5, 4)
    histogram.observe(0.25)
    assert (histogram.counts, histogram.sum) == ([5, 0], 2.25)


def test_durations_have_buckets_from_a_millisecond_to_two_minutes() -> None:
    bounds = Histogram().bounds
    assert bounds == (
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    )  # fmt: skip
    assert len(Histogram().counts) == len(bounds) + 1


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
    assert statistics.time_to_first_token.bounds == FIRST_TOKEN_SECONDS
    for histogram, bounds, finest in (
        (statistics.inter_token_latency, PER_TOKEN_SECONDS, 0.0005),
        (statistics.time_per_output_token, PER_TOKEN_SECONDS, 0.0005),
        (statistics.queue_time, REQUEST_SECONDS, 0.001),
        (statistics.decode_time, REQUEST_SECONDS, 0.001),
        (statistics.inference_time, REQUEST_SECONDS, 0.001),
        (statistics.request_time, REQUEST_SECONDS, 0.001),
        (statistics.prefill_time, PREFILL_SECONDS, 0.001),
        (statistics.prompt_length, (1, 1_000_000), 1),
        (statistics.output_length, (1, 1_000_000), 1),
    ):
        assert set(bounds) <= set(histogram.bounds)
        assert (histogram.bounds[0], list(histogram.bounds)) == (finest, sorted(set(histogram.bounds)))


def test_a_request_that_ends_is_in_every_histogram_of_requests() -> None:
    statistics = Statistics()
    record = RequestRecord(Origin(), 100, 40, 1)
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
    record = RequestRecord(Origin(), 100, 40, 1)
    statistics.request_queued(record)
    statistics.request_ended(record, SequenceResult(FinishReason.CANCELLED, 0, None, None), 108)
    assert (statistics.request_time.sum, statistics.output_length.count) == (8, 1)
    for name in ("queue_time", "prefill_time", "decode_time", "inference_time", "time_per_output_token"):
        assert getattr(statistics, name).count == 0


def test_totals_begin_at_0() -> None:
    statistics = Statistics()
    assert (statistics.requests, statistics.prompt_tokens, statistics.reused_prompt_tokens) == (0, 0, 0)
    assert (statistics.generated_tokens, statistics.finished.total()) == (0, 0)
    assert sum(statistics.queue_time.counts) == statistics.queue_time.sum == 0
    assert statistics.queue_time is not Statistics().queue_time
