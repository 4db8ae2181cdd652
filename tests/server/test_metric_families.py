"""Families of metrics."""

from __future__ import annotations

from math import inf, isnan

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metric_families import Family, family, histogram


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


def test_a_family_is_written_with_its_labels_and_nan_for_what_is_not_known() -> None:
    gauge = Family(GaugeMetricFamily, "usage", "Used.", ("model",), [])
    assert (gauge.head().name, gauge.head().documentation, gauge.head().samples) == ("usage", "Used.", [])
    (sample,) = gauge.unknown(("story",)).samples
    assert (sample.name, sample.labels, isnan(sample.value)) == ("usage", {"model": "story"}, True)
    seconds = Family(HistogramMetricFamily, "seconds", "Seconds.", ("model",), [], (0.5, 1e6, inf))
    samples = seconds.unknown(("story",)).samples
    assert [(each.name, each.labels.get("le")) for each in samples] == [
        ("seconds_bucket", "0.5"),
        ("seconds_bucket", "1e+06"),
        ("seconds_bucket", "+Inf"),
        ("seconds_count", None),
        ("seconds_sum", None),
    ]
    assert {each.labels["model"] for each in samples} == {"story"}
    assert all(isnan(each.value) for each in samples)
