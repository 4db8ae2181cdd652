"""`GET /metrics`: the statistics of the server and of every model for Prometheus.

Two sets of names have the figures of models: our own (`model_metrics`), and those of TensorRT-LLM's server
(`trtllm_metrics`), which dashboards and gateways know. docs/metrics.md lists all of them.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder

from djl_trtllm.api import Reply
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metric_families import PREFIX, Family, histogram
from djl_trtllm.server.metric_text import MetricText
from djl_trtllm.server.model_figures import ModelFigures
from djl_trtllm.server.model_metrics import model_metrics
from djl_trtllm.server.trtllm_metrics import trtllm_metrics
from djl_trtllm.service import Registry
from djl_trtllm.version import __version__

_UNKNOWN_ROUTE = "unknown"
"""The route of all requests that match none, or are refused before one is known: a client may send any path."""
_FORMATS = 4
"""Formats whose texts are kept: versions and escapings of OpenMetrics are the client's choice."""


class ServerCounts:
    def __init__(self) -> None:
        self.responses: Counter[tuple[int, str, str]] = Counter()
        """By status, route and model."""
        self.grpc_calls: Counter[str] = Counter()

    def response(self, status: int, route: str = "", model: str = "") -> None:
        """A response begins. `route` is the path with its placeholders, `model` the one that generates, if one does."""
        self.responses[status, route or _UNKNOWN_ROUTE, model] += 1

    def grpc_call(self, status: str) -> None:
        """A call of Triton's gRPC API has ended; a stream is one call."""
        self.grpc_calls[status] += 1

    def keep(self, models: Collection[str]) -> None:
        """Forget the responses of models that are not here any more: clients may register any number one by one."""
        for key in [key for key in self.responses if key[2] and key[2] not in models]:
            del self.responses[key]


class MetricsPage:
    """Reads the models' statistics on each scrape, so that counting a token needs no lock."""

    def __init__(self, registry: Registry, counts: ServerCounts, stall: Histogram) -> None:
        self._registry = registry
        self._counts = counts
        self._stall = stall
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._texts: dict[str, MetricText] = {}

    def reply(self, accept: str = "") -> Reply:
        """The page in Prometheus' text format, or as OpenMetrics if the header `Accept` asks for it."""
        encode, content_type = choose_encoder(accept)
        text = self._texts.pop(content_type, None) or MetricText(encode)
        if len(self._texts) == _FORMATS:
            del self._texts[next(iter(self._texts))]
        self._texts[content_type] = text
        return Reply(200, content_type, text.write(self._families(), self._process))

    def _families(self) -> Iterator[Family]:
        yield from self._server()
        figures = [ModelFigures.of(model) for model in self._registry.models.values()]
        yield from model_metrics(figures)
        yield from trtllm_metrics(figures, self._counts.responses)

    def _server(self) -> Iterator[Family]:
        versions = (__version__, platform.python_version())
        about = "1, with the versions."
        yield Family(GaugeMetricFamily, PREFIX + "build_info", about, ("version", "python"), [(versions, (1,))])
        self._counts.keep(self._registry.models)
        yield Family(
            CounterMetricFamily,
            PREFIX + "http_responses",
            "HTTP responses by status, path and model.",
            ("status", "route", "model"),
            [
                ((str(status), route, model), (count,))
                for (status, route, model), count in sorted(self._counts.responses.items())
            ],
        )
        calls = [((status,), (count,)) for status, count in sorted(self._counts.grpc_calls.items())]
        about = "Calls of Triton's gRPC API by status."
        yield Family(CounterMetricFamily, PREFIX + "grpc_calls", about, ("status",), calls)
        late = "How late the event loop ran a timer."
        yield histogram(PREFIX + "event_loop_stall_seconds", late, (), [((), self._stall)])
