"""Families of metrics with labels, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import nan
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from djl_trtllm.batching.statistics import Histogram

PREFIX = "djl_trtllm_"
"""Of our own names."""

written: Callable[[float], str] = floatToGoString
"""A number as Prometheus writes it."""

Labels = Sequence[str]
Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]


class Family(NamedTuple):
    """A metric: its values by their labels.

    A histogram has several values for the same labels: the cumulative count of each of its `bounds`, of which infinity
    is the last one, the count of all observations, and their sum.
    """

    kind: Kind
    name: str
    text: str
    labels: Labels
    series: Sequence[tuple[tuple[str, ...], Sequence[float]]]
    bounds: Sequence[float] = ()

    def head(self) -> Metric:
        """The family without values, as prometheus_client writes it."""
        return self.kind(self.name, self.text, labels=self.labels)

    def unknown(self, labels: Labels) -> Metric:
        """The family with NaN for each value of these labels."""
        made = self.kind(self.name, self.text, labels=self.labels)
        if isinstance(made, HistogramMetricFamily):
            made.add_metric(labels, [(written(bound), nan) for bound in self.bounds], nan)
        else:
            made.add_metric(labels, nan)
        return made


def family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    labels: Labels,
    values: Iterable[tuple[tuple[str, ...], float | None]],
) -> list[Family]:
    """A family of gauges or counters; values that are None are left out, and so is a family without any."""
    series = [(of, (value,)) for of, value in values if value is not None]
    return [Family(kind, name, text, labels, series)] if series else []


def histogram(
    name: str,
    text: str,
    labels: Labels,
    values: Iterable[tuple[tuple[str, ...], Histogram]],
    bounds: Sequence[float] | None = None,
) -> Family:
    """A family of histograms that have the same bounds, with all of them or with some."""
    series: list[tuple[tuple[str, ...], Sequence[float]]] = []
    shown: tuple[float, ...] = ()
    for of, each in values:
        shown, counts = zip(*each.cumulative(bounds), strict=True)
        series.append((of, (*counts, counts[-1], each.sum)))
    return Family(HistogramMetricFamily, name, text, labels, series, shown)
