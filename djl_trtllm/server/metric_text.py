"""The text of metrics for Prometheus, in one of its formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from djl_trtllm.server.metric_families import Family, written

_END = "# EOF\n"
"""The last line of OpenMetrics."""


@dataclass
class MetricText:
    """Writes a page again and again.

    prometheus_client writes the lines of each series once. On the pages after that only the values are new: writing all
    of a page's lines takes ten times as long, several milliseconds for a model, in which the event loop serves nobody.
    """

    encode: Callable[[Collector], bytes]
    _lines: dict[tuple[str, tuple[str, ...] | None], str] = field(default_factory=dict)
    """Of the last page: by name and labels the lines with `%s` for each value; for None, the head of the family."""

    def write(self, families: Iterable[Family], others: Collector) -> bytes:
        """The text of the families, and then of the others."""
        lines: dict[tuple[str, tuple[str, ...] | None], str] = {}
        text = []
        for family in families:
            name = family.name
            head = lines[name, None] = self._lines.get((name, None)) or self._encoded(family.head())
            text.append(head)
            for labels, values in family.series:
                key = (name, labels)
                template = self._lines.get(key)
                if template is None:
                    template = self._encoded(family.unknown(labels)).removeprefix(head)
                    template = template.replace("%", "%%").replace(" NaN\n", " %s\n")
                lines[key] = template
                text.append(template % tuple(map(written, values)))
        self._lines = lines
        return "".join(text).encode() + self.encode(others)

    def _encoded(self, metric: Metric) -> str:
        return self.encode(_One(metric)).decode().removesuffix(_END)


@dataclass
class _One(Collector):
    """Has one metric."""

    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return [self.metric]
