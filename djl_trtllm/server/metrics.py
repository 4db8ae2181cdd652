"""`GET /metrics`: the statistics of the server and of every model for Prometheus.

Models have three sets of names: our own (`_OWN`), and those of TensorRT-LLM's server (`_TRTLLM`) and vLLM's (`_VLLM`,
of speculation), which dashboards, gateways and load generators know. docs/metrics.md lists all of them.
"""

import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from djl_trtllm.api.base import Reply
from djl_trtllm.batching import statistics as figures
from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.files import read_table
from djl_trtllm.request import FINISH_WORDS, FinishReason
from djl_trtllm.service.lifecycle import Registry, ServedModel, State
from djl_trtllm.version import __version__

_PREFIX = "djl_trtllm_"
_as_text: Callable[[float], str] = floatToGoString
_UNKNOWN_ROUTE = "unknown"
"""The route of requests that match none, or are refused before it is known: a client may send any path."""
_SUCCESS = {FinishReason.END_TOKEN: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""TensorRT-LLM's names of the finish reasons of successes."""


class _Names(NamedTuple):
    """A set of names for the figures of models: a table of metrics.toml."""

    prefix: str
    labels: list[str]
    """The labels: the model's name and, in one of the sets, its engine."""
    gauges: list[list[str]]
    counters: list[list[str]]
    histograms: list[list[str]]
    """A fourth member is the constant of `batching.statistics` with the buckets."""


_OWN, _TRTLLM, _VLLM = (_Names(**names) for names in read_table("metrics.toml", "djl_trtllm.server").values())
_BY_REASON = {
    "finished": "Sequences that ended, by finish reason.",
    "ended_requests": "Requests that ended, by the finish reason of the sequence that ended worst.",
    "refused_images": "Images that were not taken: size, format, damaged, address.",
}
"""Our counters by reason: fields of the statistics, with their help."""


@dataclass(frozen=True)
class ModelFigures:
    """The figures of a model; None where a figure is unknown: no engine process runs, or it does not report it."""

    name: str
    engine: str | None
    """The backend that runs it."""
    statistics: figures.Statistics
    ready: bool
    workers: int
    restarts: int
    waiting: int
    running: int
    max_running: int | None
    max_waiting: int | None
    memory: int | None
    """Bytes of host memory of the engine processes."""
    kv_block_tokens: int | None
    speculates: bool
    stats: Stats
    """Figures that the engines report. `running` is the rolling batches' own count, in place of `stats.running`."""

    @property
    def kv_blocks_free(self) -> int | None:
        blocks, used = self.stats.kv_blocks, self.stats.kv_blocks_used
        return None if blocks is None or used is None else blocks - used

    @property
    def accepted(self) -> int | None:
        """Tokens that drafts proposed; None where nothing speculates."""
        return self.statistics.accepted_tokens if self.speculates else None

    @property
    def completed(self) -> int:
        """Requests that ended, for whatever reason."""
        return self.statistics.ended_requests.total()

    @classmethod
    def of(cls, model: ServedModel) -> "ModelFigures":
        batches = [worker.batch for worker in model.workers if worker.batch is not None]
        stats = _together([batch.engine_stats for batch in batches])
        return cls(
            name=model.name,
            engine=model.engine,
            statistics=model.statistics,
            ready=model.state is State.READY,
            workers=len(model.workers),
            restarts=model.restarts,
            waiting=sum(batch.waiting for batch in batches),
            running=sum(batch.running for batch in batches),
            max_running=_limit(batches, "max_batch_size"),
            max_waiting=_limit(batches, "max_queue_size"),
            memory=sum(worker.memory for worker in model.workers) or None,
            kv_block_tokens=max(batch.block_size for batch in batches) if stats.kv_blocks else None,
            speculates=any(batch.speculates for batch in batches),
            stats=stats,
        )


_LARGEST = ("kv_usage", "kv_hit_rate", "iterations", "iteration_seconds")


def _together(reported: list[Stats]) -> Stats:
    """One state of all workers: sums of sequences, blocks and guides, and the largest ratios and times."""
    found: dict[str, Any] = {}
    for name in Stats.__struct_fields__:
        known = [value for value in map(attrgetter(name), reported) if value is not None]
        if known:
            found[name] = max(known) if name in _LARGEST else sum(known)
    return Stats(**found)


def _limit(batches: list[RollingBatch], name: str) -> int | None:
    return sum(getattr(batch.limits, name) for batch in batches) if batches else None


class ServerCounts:
    def __init__(self) -> None:
        self.responses: Counter[tuple[int, str, str]] = Counter()
        """Responses by status, route and model."""
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


class MetricsPage(Collector):
    """Reads the models' statistics on each scrape, so that counting a token needs no lock."""

    def __init__(self, registry: Registry, counts: ServerCounts, stall: figures.Histogram) -> None:
        self._models = registry
        self._counts = counts
        self._stall = stall
        self._collectors = CollectorRegistry()
        self._collectors.register(self)
        ProcessCollector(registry=self._collectors)

    def reply(self, accept: str = "") -> Reply:
        """The page in Prometheus' text format, or as OpenMetrics if the header `Accept` asks for it."""
        encode, content_type = choose_encoder(accept)
        return Reply(200, content_type, encode(self._collectors))

    def describe(self) -> Iterable[Metric]:
        """Return nothing: otherwise registering the collector would collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._server()
        models = [ModelFigures.of(model) for model in self._models.models.values()]
        engines = [([model.name, model.engine], 1) for model in models if model.engine is not None]
        yield from _known(
            GaugeMetricFamily(_PREFIX + "model_info", "1, with the engine.", labels=["model", "engine"]), engines
        )
        yield from _figures(_OWN, models, self._reasons(models))
        yield from _figures(_TRTLLM, models, self._outcomes(models))
        yield from _figures(_VLLM, models, ())

    def _server(self) -> Iterator[Metric]:
        about = GaugeMetricFamily(_PREFIX + "build_info", "1, with the versions.", labels=["version", "python"])
        about.add_metric([__version__, platform.python_version()], 1)
        yield about
        self._counts.keep(self._models.models)
        responses = CounterMetricFamily(
            _PREFIX + "http_responses",
            "HTTP responses by status, path and model.",
            labels=["status", "route", "model"],
        )
        for (status, route, model), count in sorted(self._counts.responses.items()):
            responses.add_metric([str(status), route, model], count)
        yield responses
        calls = CounterMetricFamily(_PREFIX + "grpc_calls", "Calls of Triton's gRPC API by status.", labels=["status"])
        for name, count in sorted(self._counts.grpc_calls.items()):
            calls.add_metric([name], count)
        yield calls
        stall = HistogramMetricFamily(_PREFIX + "event_loop_stall_seconds", "How late the event loop ran a timer.")
        _observe(stall, [], self._stall)
        yield stall

    def _reasons(self, models: Sequence[ModelFigures]) -> Iterator[Metric]:
        """Counters by reason, under our own names."""
        for name, text in _BY_REASON.items():
            counts = [
                ([model.name, FINISH_WORDS.get(reason, reason)], count)
                for model in models
                for reason, count in sorted(getattr(model.statistics, name).items())
            ]
            yield from _known(CounterMetricFamily(_PREFIX + name, text, labels=["model", "reason"]), counts)

    def _outcomes(self, models: Sequence[ModelFigures]) -> Iterator[Metric]:
        """Counters of successes and of errors, under TensorRT-LLM's names."""
        given = {model.name: tuple(_labels(_TRTLLM, model)) for model in models}
        successes: Counter[tuple[str, ...]] = Counter()
        errors: Counter[tuple[str, ...]] = Counter()
        for model in models:
            for reason, count in model.statistics.ended_requests.items():
                if reason in _SUCCESS:
                    successes.update({(*given[model.name], _SUCCESS[reason]): count})
        for (status, _, name), count in self._counts.responses.items():
            if status >= 400 and name in given:
                errors.update({(*given[name], str(status)): count})
        for name, text, label, counts in (
            ("request_success", "Successful requests", "finished_reason", successes),
            ("request_error", "Request errors by HTTP status", "http_code", errors),
        ):
            family = CounterMetricFamily(_TRTLLM.prefix + name, text, labels=[*_TRTLLM.labels, label])
            yield from _known(family, counts.items())


def _figures(names: _Names, models: Sequence[ModelFigures], counted: Iterable[Metric]) -> Iterator[Metric]:
    """Return the metrics of models under a set of names; `counted` are metrics with labels of their own."""
    for kind, rows in ((GaugeMetricFamily, names.gauges), (CounterMetricFamily, names.counters)):
        for name, field, text in rows:
            value = attrgetter(field)
            values = [(_labels(names, model), value(model)) for model in models]
            yield from _known(kind(names.prefix + name, text, labels=names.labels), values)
    yield from counted
    for name, field, text, *buckets in names.histograms:
        family = HistogramMetricFamily(names.prefix + name, text, labels=names.labels)
        for model in models:
            if model.statistics.requests:  # histograms are most of the page: only those of models that were used
                bounds = (getattr(figures, each) for each in buckets)
                _observe(family, _labels(names, model), attrgetter(field)(model), *bounds)
        yield family


def _labels(names: _Names, model: ModelFigures) -> list[str]:
    return [model.name, model.engine or "unknown"][: len(names.labels)]


def _known(
    family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[Sequence[str], float | None]]
) -> Iterator[Metric]:
    """Yield the family with its known values, if there are any."""
    for labels, value in values:
        if value is not None:
            family.add_metric(labels, value)
    if family.samples:
        yield family


def _observe(
    family: HistogramMetricFamily, labels: Sequence[str], seen: figures.Histogram, bounds: Sequence[float] | None = None
) -> None:
    buckets = [(_as_text(bound), count) for bound, count in seen.cumulative(bounds)]
    family.add_metric(labels, buckets, seen.sum)
