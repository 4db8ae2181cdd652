from __future__ import annotations

import math

import numpy as np
import pytest

from djl_trtllm.bench.client import Counted, Stream
from djl_trtllm.bench.figures import Distribution, Figures, Timeline


def stream(
    intended: float, *arrivals: tuple[float, int], ended: float | None = None, error: str | None = None
) -> Stream:
    made = Stream(intended)
    for now, tokens in arrivals:
        made.add(now, tokens)
    made.ended, made.error, made.counted = ended, error, Counted.EACH
    return made


def test_percentiles_are_within_a_percent() -> None:
    values = np.linspace(0.001, 1.0, 1000)
    distribution = Distribution()
    distribution.add(values)
    for share in (0.01, 0.5, 0.9, 0.99):
        assert distribution.percentile(share) == pytest.approx(values[int(share * 1000)], rel=0.01)
    assert distribution.mean == pytest.approx(values.mean())
    assert (distribution.least, distribution.most, distribution.count) == (0.001, 1.0, 1000)
    distribution.add(np.array([0.0, 1e9]))
    assert distribution.percentile(0.0) < 2e-6 and distribution.count == 1002, "the first and the last bin"
    assert math.isnan(Distribution().percentile(0.5)) and math.isnan(Distribution().mean)
    assert Distribution().as_json() == {"count": 0}


def test_a_weight_is_that_number_of_values() -> None:
    distribution = Distribution()
    distribution.add(np.array([1.0, 4.0]), np.array([3, 1]))
    assert (distribution.count, distribution.mean) == (4, 1.75)
    assert distribution.percentile(0.5) == pytest.approx(1.0, rel=0.01)


def test_the_share_of_values_up_to_a_bound_grows_to_one() -> None:
    distribution = Distribution()
    distribution.add(np.array([0.1, 0.2, 0.2, 0.4]))
    bounds, shares = zip(*distribution.steps(), strict=True)
    assert shares == (0.25, 0.75, 1.0)
    assert all(value <= bound <= value * 1.0101 for value, bound in zip((0.1, 0.2, 0.4), bounds, strict=True))


def test_a_long_timeline_has_wider_bins_and_the_same_sums() -> None:
    timeline = Timeline()
    timeline.add("tokens", np.arange(600.0), np.full(600, 2))
    assert (timeline.width, timeline.used) == (1.0, 600)
    timeline.add("tokens", np.array([600.0]), np.array([7]))
    assert (timeline.width, timeline.used) == (2.0, 301)
    assert timeline.sums["tokens"].sum() == 1207
    assert timeline.as_json()["tokens_per_second"][:2] == [2.0, 2.0]


def test_tokens_belong_to_the_window_in_which_they_arrive() -> None:
    figures = Figures("", begin=10.0)
    # Sent in the warm-up, and complete after the end.
    figures.add(stream(9.0, (9.5, 1), (10.5, 2), (19.5, 1), (20.5, 5), ended=21.0), 20.0)
    figures.end = 20.0
    assert (figures.tokens, figures.events, figures.sent) == (3, 2, 0)
    assert figures.tokens_per_second == 0.3
    assert figures.itl.count == 3  # 2 of half a second, one of 9 seconds
    assert figures.itl.mean == pytest.approx((0.5 + 0.5 + 9.0) / 3)


def test_latencies_count_from_the_intended_time() -> None:
    figures = Figures("", begin=0.0)
    late = stream(1.0, (4.0, 1), (5.0, 1), ended=6.0)
    late.sent = 3.0
    figures.add(late, 10.0)
    assert (figures.ttft.mean, figures.e2e.mean, figures.lag.mean) == (3.0, 5.0, 2.0)


def test_requests_outside_the_window_have_no_latency() -> None:
    figures = Figures("", begin=5.0)
    figures.add(stream(4.9, (5.0, 1), ended=6.0), 10.0)
    figures.add(stream(10.0, (11.0, 1), ended=12.0), 10.0)
    assert (figures.ttft.count, figures.sent, figures.ended_in_window) == (0, 0, 1)
    figures.add(stream(4.5, (4.7, 1), ended=5.0), 10.0)
    figures.add(stream(4.5, (4.7, 1), ended=10.0), 10.0)
    assert figures.ended_in_window == 2, "the beginning belongs to the window, and the end does not"


def test_errors_are_counted_by_kind_with_one_example_and_kinds_are_bounded() -> None:
    figures = Figures("", begin=0.0)
    for number in range(3):
        failed = stream(1.0, ended=2.0, error="HTTP 429")
        failed.detail = f"number {number}"
        figures.add(failed, 10.0)
    assert (figures.errors, figures.details) == ({"HTTP 429": 3}, {"HTTP 429": "number 0"})
    assert (figures.failed, figures.succeeded, figures.sent, figures.ended_in_window) == (3, 0, 3, 0)
    for number in range(99):
        figures.add(stream(1.0, ended=2.0, error=f"error {number}"), 10.0)
    assert (len(figures.errors), figures.errors["other errors"]) == (21, 80)


def test_a_request_without_an_end_is_unfinished_and_its_tokens_count() -> None:
    figures = Figures("", begin=0.0)
    figures.add(stream(1.0, (2.0, 4)), 10.0)
    assert (figures.unfinished, figures.succeeded, figures.failed) == (1, 0, 0)
    assert (figures.tokens, figures.ttft.count, figures.e2e.count) == (4, 1, 0)


def test_outputs_shorter_than_asked_for_are_counted() -> None:
    figures = Figures("", begin=0.0)
    for requested in (0, 2, 3):
        made = stream(0.0, (1.0, 2), ended=2.0)
        made.requested = requested
        figures.add(made, 10.0)
    assert figures.shortened == 1


def test_the_json_has_rates_over_the_window_and_means_over_requests() -> None:
    figures = Figures("", begin=0.0, concurrency=3)
    first = stream(0.0, (1.0, 3), (2.0, 3), ended=2.0)
    first.prompt_tokens = 11
    figures.add(first, 4.0)
    figures.end = 4.0
    data = figures.as_json()
    assert (data["concurrency"], data["seconds"], data["requests_per_second"]) == (3, 4.0, 0.25)
    assert (data["output_tokens_per_second"], data["output_tokens_mean"], data["prompt_tokens_mean"]) == (
        1.5,
        6.0,
        11.0,
    )
    assert (data["tokens_per_event"], data["tokens_counted_by"]) == (3.0, {"token by token": 1})
    assert data["requests"] == {"sent": 1, "succeeded": 1, "failed": 0, "unfinished": 0}
    assert "rate" not in data
    assert data["timeline"]["ttft_mean_seconds"][0] == 1.0
    assert data["timeline"]["tokens_per_second"] == [0.0, 3.0, 3.0]
    assert (data["timeline"]["ended"], data["timeline"]["failed"]) == ([0, 0, 1], [0, 0, 0])
    means = {
        "accepted_tokens_share",
        "output_tokens_mean",
        "prompt_tokens_mean",
        "tokens_per_event",
        "tokens_counted_by",
    }
    rates = {"requests_per_second", "output_tokens_per_second"}
    times = {"ttft_seconds", "itl_seconds", "e2e_seconds"}
    rest = {"concurrency", "seconds", "complete", "requests", "errors", "client", "timeline"}
    assert set(data) == means | rates | times | rest
    assert set(data["ttft_seconds"]) == {"count", "mean", "min", "p50", "p90", "p95", "p99", "max"}
    assert set(data["client"]) == {"cpu_share", "send_lag_seconds"}
