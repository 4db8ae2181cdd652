"""The text of metrics."""

from __future__ import annotations

from math import inf, nan

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metric_families import Family, histogram
from djl_trtllm.server.metric_text import MetricText

NAMES = ("story", "50 %s %", 'a "quoted" \\ name\n# EOF\n', "für NaN\n", " NaN")
FORMATS = (
    "",
    "text/plain; version=1.0.0; escaping=allow-utf-8",
    "application/openmetrics-text; version=1.0.0",
    "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8",
)


class Given(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self.metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self.metrics


def observed(*values: float) -> Histogram:
    made = Histogram((0.5, 1.0, 1e6))
    for value in values:
        made.observe(value)
    return made


def families(factor: float) -> list[Family]:
    """With the labels of `NAMES`, and other values for another factor."""
    gauges = [((name, "x"), (number * factor,)) for number, name in enumerate(NAMES)]
    seconds = [((name,), observed(0.1 * factor, 0.7, 9e6)) for name in NAMES]
    return [
        Family(GaugeMetricFamily, "usage", "Used: 7 %s of\nall NaN", ("model", "a"), gauges),
        Family(CounterMetricFamily, "requests", "Requests.", (), [((), (1234567 * factor,))]),
        Family(GaugeMetricFamily, "odd", "Odd.", ("model",), [(("a",), (inf,)), (("b",), (nan,)), (("c",), (-inf,))]),
        Family(CounterMetricFamily, "none", "None yet.", ("model",), []),
        histogram("seconds", "Seconds.", ("model",), seconds),
        histogram("coarse_seconds", "Some bounds.", ("model",), seconds, (1.0,)),
    ]


def as_metric(family: Family) -> Metric:
    """The same in prometheus_client's own objects."""
    made = family.head()
    for labels, values in family.series:
        if isinstance(made, HistogramMetricFamily):
            counts = values[: len(family.bounds)]
            bounds = map(floatToGoString, family.bounds)
            made.add_metric(labels, list(zip(bounds, counts, strict=True)), values[-1])
        elif isinstance(made, GaugeMetricFamily | CounterMetricFamily):
            made.add_metric(labels, values[0])
    return made


@pytest.mark.parametrize("accept", FORMATS)
def test_each_page_is_what_prometheus_client_writes(accept: str) -> None:
    encode, _ = choose_encoder(accept)
    others = GaugeMetricFamily("others", "Others.", value=3)
    text = MetricText(encode)
    for factor in (1, 2, 0.25):
        found = families(factor)
        whole = encode(Given(*map(as_metric, found), others))
        assert text.write(found, Given(others)) == whole


def test_prometheus_client_writes_the_lines_of_a_series_once() -> None:
    written = []

    def encode(registry: Collector) -> bytes:
        written.extend([sample for metric in registry.collect() for sample in metric.samples])
        return choose_encoder("")[0](registry)

    text = MetricText(encode)
    text.write(families(1), CollectorRegistry())
    once = len(written)
    text.write(families(2), CollectorRegistry())
    assert len(written) == once > len(NAMES)


def test_series_that_are_gone_are_forgotten() -> None:
    text = MetricText(choose_encoder("")[0])
    text.write(families(1), CollectorRegistry())
    for number in range(100):
        series = [((f"model-{number}",), (1.0,))]
        text.write([Family(GaugeMetricFamily, "usage", "Used.", ("model",), series)], CollectorRegistry())
    assert set(text._lines) == {("usage", None), ("usage", ("model-99",))}
