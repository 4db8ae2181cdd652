"""Families of metrics."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metric_families import family, histogram


def test_what_is_not_known_is_left_out() -> None:
    (found,) = family(GaugeMetricFamily, "usage", "Used.", ["model"], [(("a",), None), (("b",), 0), (("c",), 0.5)])
    assert [(sample.labels, sample.value) for sample in found.samples] == [({"model": "b"}, 0), ({"model": "c"}, 0.5)]
    assert family(CounterMetricFamily, "used", "Used.", ["model"], [(("a",), None)]) == []


def test_a_histogram_has_all_of_its_bounds_or_those_that_are_asked_for() -> None:
    observed = Histogram((0.5, 1.0, 2.0, 1e6))
    for value in (0.1, 0.7, 0.8, 1.5, 9):
        observed.observe(value)
    whole = histogram("seconds", "Seconds.", ["model"], [(("a",), observed)])
    coarse = histogram("seconds", "Seconds.", ["model"], [(("a",), observed)], (1.0, 2.0))
    buckets = [
        {sample.labels["le"]: sample.value for sample in each.samples if "le" in sample.labels}
        for each in (whole, coarse)
    ]
    assert buckets == [{"0.5": 1, "1.0": 3, "2.0": 4, "1e+06": 5, "+Inf": 5}, {"1.0": 3, "2.0": 4, "+Inf": 5}]
    assert [sample.value for sample in coarse.samples[-2:]] == [5, observed.sum]
