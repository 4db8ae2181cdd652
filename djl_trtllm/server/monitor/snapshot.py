"""The numbers of a model for the live page, from statistics that are kept anyway. Never any text of a request."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.server.model_figures import ModelFigures
from djl_trtllm.service import Registry, ServedModel
from djl_trtllm.version import __version__

_ROWS = 128
"""Requests in a snapshot, live ones first."""
_ENDED_ROWS = 32
"""Rows that live requests leave to ended ones."""
_LONGEST_ID = 80
_LONGEST_FAILURE = 300


def snapshot(registry: Registry, name: str | None, began: float, now: float) -> dict[str, Any]:
    """The server, its models, and the model of that name (None: the first), None if there is none.

    `began` and `now` are on the clock of the records (`time.monotonic`). Times in the snapshot are milliseconds since
    `began`.
    """
    models = registry.models
    model = next(iter(models.values()), None) if name is None else models.get(name)
    return {
        "clock": _milliseconds(now, began),
        "server": {"version": __version__, "uptime": now - began},
        "models": [{"name": each.name, "state": each.state.value} for each in models.values()],
        "model": None if model is None else _model(model, began),
    }


def _model(model: ServedModel, began: float) -> dict[str, Any]:
    figures = ModelFigures.of(model)
    statistics = figures.statistics
    live = list(statistics.live.values())
    prefill = sum(each.sequences for each in live if each.started is not None and each.first_token_at is None)
    failure = model.failure
    return {
        "name": figures.name,
        "state": model.state.value,
        "failure": None if failure is None else str(failure).partition("\n")[0][:_LONGEST_FAILURE],
        "engine": figures.engine,
        "workers": figures.workers,
        "restarts": figures.restarts,
        "limits": _limits(model, figures),
        "memory": figures.memory,
        "live": len(live),
        "running": figures.running,
        "prefill": min(prefill, figures.running),
        "waiting": figures.waiting,
        "requests": statistics.requests,
        "prompt_tokens": statistics.prompt_tokens,
        "reused_prompt_tokens": statistics.reused_prompt_tokens,
        "generated_tokens": statistics.generated_tokens,
        "finished": {reason.name.lower(): count for reason, count in statistics.finished.items()},
        "kv": {"usage": figures.kv_usage, "blocks": figures.kv_blocks, "used": figures.kv_blocks_used},
        "latency": {
            "first_token": _buckets(statistics.time_to_first_token),
            "inter_token": _buckets(statistics.inter_token_latency),
        },
        "rows": [_row(each, began) for each in _shown(live, statistics.ended)],
    }


def _limits(model: ServedModel, figures: ModelFigures) -> dict[str, int | None] | None:
    """Sequences of all workers together, and tokens; None until there is an engine."""
    if figures.max_running is None:
        return None
    limits = model.model.limits
    return {
        "batch": figures.max_running,
        "queue": figures.max_waiting,
        "prompt": limits.max_input_len,
        "sequence": limits.max_seq_len,
    }


def _buckets(histogram: Histogram) -> dict[str, Any]:
    return {"bounds": histogram.bounds, "counts": histogram.counts}


def _shown(live: list[RequestRecord], ended: Iterable[RequestRecord]) -> list[RequestRecord]:
    """The requests with a row, in the order in which they came: what runs before what waits before what has ended."""
    last = list(islice(reversed(list(ended)), max(_ENDED_ROWS, _ROWS - len(live))))
    ordered = sorted(live, key=lambda each: each.started is None) if len(live) > _ROWS else live
    return sorted([*ordered[: _ROWS - min(len(last), _ENDED_ROWS)], *last], key=lambda each: each.number)


def _row(record: RequestRecord, began: float) -> tuple[Any, ...]:
    """The order is that of ROW in monitor.js."""
    return (
        record.number,
        (record.origin.request_id or str(record.number))[:_LONGEST_ID],
        _milliseconds(record.arrived, began),
        _milliseconds(record.started, began),
        _milliseconds(record.first_token_at, began),
        _milliseconds(record.ended, began),
        record.prompt_tokens,
        record.reused_tokens,
        record.generated_tokens,
        record.sequences,
        None if record.reason is None else record.reason.name.lower(),
    )


def _milliseconds(at: float | None, began: float) -> int | None:
    return None if at is None else round((at - began) * 1000)
