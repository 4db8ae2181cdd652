"""`GET /metrics`: the statistics of every model in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from djl_trtllm.api import Reply
from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.service import Registry, ServedModel, State

_PREFIX = "djl_trtllm_"

_HISTOGRAMS = {
    "time_to_first_token": "Seconds from arrival to the first token of a request.",
    "inter_token_latency": "Seconds between two tokens of a sequence.",
    "queue_time": "Seconds a request waited before it ran.",
    "request_time": "Seconds from arrival to the end of a request.",
}

_ENGINE_GAUGES = (
    ("kv_cache_usage_ratio", "kv_usage", "Used share of the KV cache, 0 to 1."),
    ("kv_cache_blocks", "kv_blocks", "Blocks of the KV cache (TensorRT-LLM)."),
    ("kv_cache_used_blocks", "kv_blocks_used", "Used blocks of the KV cache (TensorRT-LLM)."),
    ("kv_cache_hit_ratio", "kv_hit_rate", "Share of KV cache blocks that were reused, 0 to 1 (TensorRT-LLM)."),
    ("engine_queued", "queued", "Sequences that wait inside the engine (TensorRT-LLM)."),
    ("engine_paused", "paused", "Sequences that gave up their KV cache for others (TensorRT-LLM)."),
    ("engine_iterations", "iterations", "Number of the last iteration (TensorRT-LLM)."),
    ("engine_iteration_seconds", "iteration_seconds", "Duration of the last iteration (TensorRT-LLM)."),
)
"""Metric, field of `Stats`, help text. Statistics that an engine does not provide are 0."""


class ServerCounts:
    def __init__(self) -> None:
        self.responses: Counter[int] = Counter()
        self.grpc_calls: Counter[str] = Counter()

    def response(self, status: int) -> None:
        self.responses[status] += 1

    def grpc_call(self, status: str) -> None:
        """A call of Triton's gRPC API has ended; a stream is one call."""
        self.grpc_calls[status] += 1


class MetricsPage:
    """Reads the models' statistics on each scrape, so that counting a token needs no lock."""

    def __init__(self, registry: Registry, counts: ServerCounts, stall: Histogram) -> None:
        self._registry = registry
        self._counts = counts
        self._stall = stall
        self._prometheus = CollectorRegistry()
        self._prometheus.register(self)

    def reply(self) -> Reply:
        return Reply(200, "text/plain; version=0.0.4; charset=utf-8", generate_latest(self._prometheus))

    def collect(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(_PREFIX + "http_responses", "HTTP responses by status.", labels=["status"])
        for status, count in sorted(self._counts.responses.items()):
            responses.add_metric([str(status)], count)
        yield responses
        calls = CounterMetricFamily(_PREFIX + "grpc_calls", "Calls of Triton's gRPC API by status.", labels=["status"])
        for name, count in sorted(self._counts.grpc_calls.items()):
            calls.add_metric([name], count)
        yield calls
        yield _histogram("event_loop_stall_seconds", "How late the event loop ran a timer.", {"server": self._stall})
        models = list(self._registry.models.values())
        yield from _gauges(models)
        yield from _counters(models)
        for name, text in _HISTOGRAMS.items():
            yield _histogram(name + "_seconds", text, {m.name: getattr(m.statistics, name) for m in models})


def _by_model(
    family: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, values: Mapping[str, float]
) -> Metric:
    metric = family(_PREFIX + name, text, labels=["model"])
    for model, value in values.items():
        metric.add_metric([model], value)
    return metric


def _gauges(models: list[ServedModel]) -> Iterator[Metric]:
    gauge = partial(_by_model, GaugeMetricFamily)
    batches = {model.name: [worker.batch for worker in model.workers if worker.batch] for model in models}
    yield gauge("ready", "1 while the model can generate.", {m.name: float(m.state is State.READY) for m in models})
    yield gauge("workers", "Engine processes of the model.", {m.name: float(len(m.workers)) for m in models})
    yield gauge(
        "waiting", "Sequences in the queue.", {n: float(sum(b.waiting for b in bs)) for n, bs in batches.items()}
    )
    yield gauge(
        "running", "Sequences in the engine.", {n: float(sum(b.running for b in bs)) for n, bs in batches.items()}
    )
    memory = {m.name: float(sum(worker.memory for worker in m.workers)) for m in models}
    yield gauge("executor_memory_bytes", "Resident memory of the engine processes.", memory)
    for name, field, text in _ENGINE_GAUGES:
        # Of several workers the largest value.
        values = {n: max((float(getattr(b.engine_stats, field)) for b in bs), default=0.0) for n, bs in batches.items()}
        yield gauge(name, text, values)


def _counters(models: list[ServedModel]) -> Iterator[Metric]:
    counter = partial(_by_model, CounterMetricFamily)
    statistics = {model.name: model.statistics for model in models}
    yield counter("requests", "Requests queued.", {n: s.requests for n, s in statistics.items()})
    resumed = {n: s.resumed for n, s in statistics.items()}
    yield counter("resumed", "Requests that went on in a new engine process.", resumed)
    yield counter("prompt_tokens", "Prompt tokens.", {n: s.prompt_tokens for n, s in statistics.items()})
    reused = {n: s.reused_prompt_tokens for n, s in statistics.items()}
    yield counter("reused_prompt_tokens", "Prompt tokens taken from the prefix cache.", reused)
    yield counter("generated_tokens", "Tokens generated.", {n: s.generated_tokens for n, s in statistics.items()})
    yield counter("executor_restarts", "Engine processes replaced.", {m.name: m.restarts for m in models})
    finished = CounterMetricFamily(_PREFIX + "finished", "Sequences by finish reason.", labels=["model", "reason"])
    for name, figures in statistics.items():
        for reason, count in figures.finished.items():
            finished.add_metric([name, FINISH_REASONS[reason]], count)
    yield finished


def _histogram(name: str, text: str, values: dict[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(_PREFIX + name, text, labels=["model"])
    for model, histogram in values.items():
        bounds = [*map(str, histogram.bounds), "+Inf"]
        totals = map(float, accumulate(histogram.counts))
        family.add_metric([model], list(zip(bounds, totals, strict=True)), histogram.sum)
    return family
