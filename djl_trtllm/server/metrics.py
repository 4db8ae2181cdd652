"""`GET /metrics`: the statistics of the server and of every model for Prometheus.

Two sets of names have the figures of models: our own (`model_metrics`), and those of TensorRT-LLM's server
(`trtllm_metrics`), which dashboards and gateways know. docs/metrics.md lists all of them.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from djl_trtllm.api import Reply
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.metric_families import PREFIX, histogram
from djl_trtllm.server.model_figures import ModelFigures
from djl_trtllm.server.model_metrics import model_metrics
from djl_trtllm.server.trtllm_metrics import trtllm_metrics
from djl_trtllm.service import Registry
from djl_trtllm.version import __version__

_UNKNOWN_ROUTE = "unknown"
"""The route of all requests that match none, or are refused before one is known: a client may send any path."""


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
        self._prometheus = CollectorRegistry()
        self._prometheus.register(self)
        ProcessCollector(registry=self._prometheus)

    def reply(self, accept: str = "") -> Reply:
        """The page in Prometheus' text format, or as OpenMetrics if the header `Accept` asks for it."""
        encode, content_type = choose_encoder(accept)
        return Reply(200, content_type, encode(self._prometheus))

    def describe(self) -> list[Metric]:
        """Nothing: registering this object must not collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        figures = [ModelFigures.of(model) for model in self._registry.models.values()]
        yield from model_metrics(figures)
        yield from trtllm_metrics(figures, self._counts.responses)

    def _server(self) -> Iterator[Metric]:
        build = GaugeMetricFamily(PREFIX + "build_info", "1, with the versions.", labels=["version", "python"])
        build.add_metric([__version__, platform.python_version()], 1)
        yield build
        self._counts.keep(self._registry.models)
        responses = CounterMetricFamily(
            PREFIX + "http_responses",
            "HTTP responses by status, path and model.",
            labels=["status", "route", "model"],
        )
        for (status, route, model), count in sorted(self._counts.responses.items()):
            responses.add_metric([str(status), route, model], count)
        yield responses
        calls = CounterMetricFamily(PREFIX + "grpc_calls", "Calls of Triton's gRPC API by status.", labels=["status"])
        for name, count in sorted(self._counts.grpc_calls.items()):
            calls.add_metric([name], count)
        yield calls
        late = "How late the event loop ran a timer."
        yield histogram(PREFIX + "event_loop_stall_seconds", late, (), [((), self._stall)])
