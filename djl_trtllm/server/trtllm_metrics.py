"""The metrics of models under the names of TensorRT-LLM's own server, which gateways, dashboards and load generators
know: `MetricsCollector` in tensorrt_llm/metrics/collector.py, with its labels and buckets.

Each is there if this server has the quantity with the meaning that it has there. Sequences count as requests, as there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from djl_trtllm.batching.statistics import FIRST_TOKEN_SECONDS, PER_TOKEN_SECONDS, PREFILL_SECONDS, REQUEST_SECONDS
from djl_trtllm.request import FinishReason
from djl_trtllm.server.metric_families import Family, family, histogram
from djl_trtllm.server.model_figures import ModelFigures

_PREFIX = "trtllm_"
_LABELS = ("model_name", "engine_type")

_SUCCESS = {FinishReason.END_TOKEN: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
"""TensorRT-LLM's finish reasons."""

Value = Callable[[ModelFigures], float | None]

_GAUGES: Mapping[str, tuple[str, Value]] = {
    "num_requests_running": ("Number of active requests", lambda model: model.running),
    "num_requests_waiting": ("Number of queued requests", lambda model: model.waiting),
    "max_num_active_requests": ("Maximum number of active requests", lambda model: model.max_running),
    "max_batch_size_static": ("Static maximum batch size", lambda model: model.max_running),
    "num_paused_requests": ("Number of paused requests", lambda model: model.paused),
    "iteration_latency_seconds": ("Iteration latency in seconds", lambda model: model.iteration_seconds),
    "cpu_memory_usage_bytes": ("CPU memory usage in bytes", lambda model: model.memory),
    "kv_cache_utilization": ("KV cache utilization", lambda model: model.kv_usage),
    "kv_cache_hit_rate": ("KV cache hit rate", lambda model: model.kv_hit_rate),
    "kv_cache_max_blocks": ("Maximum number of KV cache blocks", lambda model: model.kv_blocks),
    "kv_cache_used_blocks": ("Number of used KV cache blocks", lambda model: model.kv_blocks_used),
    "kv_cache_free_blocks": ("Number of free KV cache blocks", lambda model: _free(model)),
    "kv_cache_tokens_per_block": ("Number of tokens per KV cache block", lambda model: model.kv_block_tokens),
}
_COUNTERS: Mapping[str, tuple[str, Value]] = {
    "num_requests_completed": ("Number of completed requests", lambda model: model.statistics.ended_requests.total()),
    "prompt_tokens": ("Number of prompt tokens", lambda model: model.statistics.prompt_tokens),
    "generation_tokens": ("Number of generated tokens", lambda model: model.statistics.generated_tokens),
    "prompt_cached_tokens": ("Prompt tokens from the KV cache", lambda model: model.statistics.reused_prompt_tokens),
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("time_to_first_token", "Time to first token", FIRST_TOKEN_SECONDS),
    "time_per_output_token_seconds": ("time_per_output_token", "Time per output token", PER_TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("request_time", "End to end request latency", REQUEST_SECONDS),
    "request_queue_time_seconds": ("queue_time", "Time in the queue", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("prefill_time", "From the queue to the first token", PREFILL_SECONDS),
    "request_decode_time_seconds": ("decode_time", "From the first to the last token", REQUEST_SECONDS),
    "request_inference_time_seconds": ("inference_time", "From the queue to the last token", REQUEST_SECONDS),
}
"""Field of `Statistics`, text, buckets."""


def trtllm_metrics(models: Sequence[ModelFigures], responses: Mapping[tuple[int, str, str], int]) -> Iterator[Family]:
    """`responses` are HTTP responses by status, route and model."""
    labels = {model.name: (model.name, model.engine or "unknown") for model in models}
    for name, (text, value) in _GAUGES.items():
        values = ((labels[model.name], value(model)) for model in models)
        yield from family(GaugeMetricFamily, _PREFIX + name, text, _LABELS, values)
    for name, (text, value) in _COUNTERS.items():
        values = ((labels[model.name], value(model)) for model in models)
        yield from family(CounterMetricFamily, _PREFIX + name, text, _LABELS, values)
    successes: Counter[tuple[str, str]] = Counter()
    for model in models:
        for reason, count in model.statistics.ended_requests.items():
            if reason in _SUCCESS:
                successes[model.name, _SUCCESS[reason]] += count
    yield from family(
        CounterMetricFamily,
        _PREFIX + "request_success",
        "Successful requests",
        [*_LABELS, "finished_reason"],
        (((*labels[name], reason), count) for (name, reason), count in successes.items()),
    )
    errors: Counter[tuple[str, int]] = Counter()
    for (status, _, name), count in responses.items():
        if status >= 400 and name in labels:
            errors[name, status] += count
    yield from family(
        CounterMetricFamily,
        _PREFIX + "request_error",
        "Request errors by HTTP status",
        [*_LABELS, "http_code"],
        (((*labels[name], str(status)), count) for (name, status), count in errors.items()),
    )
    used = [model for model in models if model.statistics.requests]
    for name, (field, text, bounds) in _HISTOGRAMS.items():
        of_models = [(labels[model.name], getattr(model.statistics, field)) for model in used]
        yield histogram(_PREFIX + name, f"{text} in seconds", _LABELS, of_models, bounds)


def _free(model: ModelFigures) -> int | None:
    if model.kv_blocks is None or model.kv_blocks_used is None:
        return None
    return model.kv_blocks - model.kv_blocks_used
