"""The metrics of models under our own names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.server.metric_families import PREFIX, Family, family, histogram
from djl_trtllm.server.model_figures import ModelFigures

_GAUGES = (
    ("ready", "ready", "1 while the model can generate."),
    ("workers", "workers", "Workers of the model, each with an engine process."),
    ("waiting", "waiting", "Sequences in the queue."),
    ("running", "running", "Sequences in the engine."),
    ("max_running", "max_running", "Sequences that may be in the engine (option.max_rolling_batch_size)."),
    ("max_waiting", "max_waiting", "Sequences that may be in the queue (job_queue_size)."),
    ("executor_memory_bytes", "memory", "Resident memory of the engine processes."),
    ("kv_cache_usage_ratio", "kv_usage", "Used share of the KV cache, 0 to 1."),
    ("kv_cache_blocks", "kv_blocks", "Blocks of the KV cache."),
    ("kv_cache_used_blocks", "kv_blocks_used", "Used blocks of the KV cache."),
    ("kv_cache_tokens_per_block", "kv_block_tokens", "Tokens in a block of the KV cache."),
    ("kv_cache_hit_ratio", "kv_hit_rate", "Share of KV cache blocks that were reused, 0 to 1 (TensorRT-LLM)."),
    ("engine_queued", "queued", "Sequences that wait inside the engine (TensorRT-LLM)."),
    ("engine_paused", "paused", "Sequences that gave up their KV cache for others (TensorRT-LLM)."),
    ("engine_iterations", "iterations", "Number of the last iteration (TensorRT-LLM)."),
    ("engine_iteration_seconds", "iteration_seconds", "Duration of the last iteration (TensorRT-LLM)."),
)
"""Metric, field of `ModelFigures`, help text."""

_COUNTERS = (
    ("requests", "statistics.requests", "Requests queued."),
    ("resumed", "statistics.resumed", "Requests that went on in a new engine process."),
    ("prompt_tokens", "statistics.prompt_tokens", "Prompt tokens."),
    ("reused_prompt_tokens", "statistics.reused_prompt_tokens", "Prompt tokens taken from the prefix cache."),
    ("generated_tokens", "statistics.generated_tokens", "Tokens generated."),
    ("executor_restarts", "restarts", "Engine processes replaced."),
)
_BY_REASON = (
    ("finished", "finished", "Sequences that ended, by finish reason."),
    ("ended_requests", "ended_requests", "Requests that ended, by the finish reason of the sequence that ended worst."),
)
_HISTOGRAMS = (
    ("time_to_first_token_seconds", "time_to_first_token", "Seconds from arrival to the first token of a request."),
    ("inter_token_latency_seconds", "inter_token_latency", "Seconds between two tokens of a sequence."),
    ("time_per_output_token_seconds", "time_per_output_token", "Mean seconds between the tokens of a request."),
    ("queue_time_seconds", "queue_time", "Seconds a request waited before it ran."),
    ("prefill_time_seconds", "prefill_time", "Seconds from the queue to the first token of a request."),
    ("decode_time_seconds", "decode_time", "Seconds from the first to the last token of a request."),
    ("request_time_seconds", "request_time", "Seconds from arrival to the end of a request."),
    ("request_prompt_tokens", "prompt_length", "Prompt tokens of a request."),
    ("request_generated_tokens", "output_length", "Tokens that were generated for a request."),
)
"""Metric, field of `Statistics`, help text."""


def model_metrics(models: Sequence[ModelFigures]) -> Iterator[Family]:
    engines = (((model.name, model.engine), 1) for model in models if model.engine is not None)
    yield from family(GaugeMetricFamily, PREFIX + "model_info", "1, with the engine.", ["model", "engine"], engines)
    for name, field, text in _GAUGES:
        yield from family(GaugeMetricFamily, PREFIX + name, text, ["model"], _values(models, field))
    for name, field, text in _COUNTERS:
        yield from family(CounterMetricFamily, PREFIX + name, text, ["model"], _values(models, field))
    for name, field, text in _BY_REASON:
        counts = (
            ((model.name, FINISH_REASONS[reason]), count)
            for model in models
            for reason, count in sorted(getattr(model.statistics, field).items())
        )
        yield from family(CounterMetricFamily, PREFIX + name, text, ["model", "reason"], counts)
    # Histograms are most of the page: only those of models that were used.
    used = [model for model in models if model.statistics.requests]
    for name, field, text in _HISTOGRAMS:
        values = [((model.name,), getattr(model.statistics, field)) for model in used]
        yield histogram(PREFIX + name, text, ["model"], values)


def _values(models: Sequence[ModelFigures], field: str) -> Iterator[tuple[tuple[str], float | None]]:
    value = attrgetter(field)
    return (((model.name,), value(model)) for model in models)
