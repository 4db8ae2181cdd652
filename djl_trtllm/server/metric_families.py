"""Families of metrics with labels, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from djl_trtllm.batching.statistics import Histogram

PREFIX = "djl_trtllm_"
"""Of our own names."""

_go: Callable[[float], str] = floatToGoString

Labels = Sequence[str]
Family = TypeVar("Family", GaugeMetricFamily, CounterMetricFamily)


def family(
    kind: type[Family], name: str, text: str, labels: Labels, values: Iterable[tuple[Labels, float | None]]
) -> list[Metric]:
    """A family of gauges or counters; values that are None are left out, and so is a family without any."""
    made = kind(name, text, labels=labels)
    for label_values, value in values:
        if value is not None:
            made.add_metric(label_values, float(value))
    return [made] if made.samples else []


def histogram(
    name: str,
    text: str,
    labels: Labels,
    values: Iterable[tuple[Labels, Histogram]],
    bounds: Sequence[float] | None = None,
) -> Metric:
    """A family of histograms, with all of their bounds or with some."""
    made = HistogramMetricFamily(name, text, labels=labels)
    for label_values, each in values:
        # Prometheus writes numbers as Go does.
        buckets = [(_go(bound), float(count)) for bound, count in each.cumulative(bounds)]
        made.add_metric(label_values, buckets, each.sum)
    return made
