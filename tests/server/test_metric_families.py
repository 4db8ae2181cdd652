"""Families of metrics."""

from __future__ import annotations

from math import inf

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metric_families import family, histogram


def test_what_is_not_known_is_left_out() -> None:
    (found,) = family(GaugeMetricFamily, "usage", "Used.", ["model"], [(("a",), None), (("b",), 0), (("c",), 0.5)])
    assert found.series == [(("b",), (0,)), (("c",), (0.5,))]
    assert family(CounterMetricFamily, "used", "Used.", ["model"], [(("a",), None)]) == []


def test_a_histogram_has_all_of_its_bounds_or_those_that_are_asked_for() -> None:
    observed = Histogram((0.5, 1.0, 2.0, 1e6))
    for value in (0.1, 0.7, 0.8, 1.5, 9):
        observed.observe(value)
    whole = histogram("seconds", "Seconds.", ["model"], [(("a",), observed)])
    assert whole.bounds == (0.5, 1.0, 2.0, 1e6, inf)
    assert whole.series == [(("a",), (1, 3, 4, 5, 5, 5, observed.sum))]
    coarse = histogram("seconds", "Seconds.", ["model"], [(("a",), observed)], (1.0, 2.0))
    assert coarse.bounds == (1.0, 2.0, inf)
    assert coarse.series == [(("a",), (3, 4, 5, 5, observed.sum))]
