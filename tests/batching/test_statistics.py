"""Counts in buckets."""

from __future__ import annotations

from djl_trtllm.batching.statistics import Histogram, Statistics


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


def test_totals_begin_at_0() -> None:
    statistics = Statistics()
    assert (statistics.requests, statistics.prompt_tokens, statistics.reused_prompt_tokens) == (0, 0, 0)
    assert (statistics.generated_tokens, statistics.finished.total()) == (0, 0)
    assert sum(statistics.queue_time.counts) == statistics.queue_time.sum == 0
    assert statistics.queue_time is not Statistics().queue_time
