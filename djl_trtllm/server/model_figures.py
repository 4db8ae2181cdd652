"""The state of a model in figures, over all of its workers: what pages and metrics show of it."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from djl_trtllm.batching.rolling_batch import RollingBatch
from djl_trtllm.batching.statistics import Statistics
from djl_trtllm.executor.protocol import Stats
from djl_trtllm.service import ServedModel, State


@dataclass(frozen=True)
class ModelFigures:
    """None is what is not known: before an engine process runs, or because the engine does not report it.

    Numbers of sequences, requests and blocks are those of all workers together; of the rest the largest one counts.
    """

    name: str
    engine: str | None
    """The backend that runs it."""
    statistics: Statistics
    ready: bool
    workers: int
    restarts: int
    waiting: int
    running: int
    max_running: int | None
    max_waiting: int | None
    memory: int | None
    """Bytes of host memory of the engine processes."""
    kv_usage: float | None
    kv_blocks: int | None
    kv_blocks_used: int | None
    kv_block_tokens: int | None
    kv_hit_rate: float | None
    queued: int | None
    paused: int | None
    iterations: float | None
    iteration_seconds: float | None

    @classmethod
    def of(cls, model: ServedModel) -> ModelFigures:
        batches = [worker.batch for worker in model.workers if worker.batch is not None]
        stats = [batch.engine_stats for batch in batches]
        blocks = _sum(stats, "kv_blocks")
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
            kv_usage=_most(stats, "kv_usage"),
            kv_blocks=blocks,
            kv_blocks_used=_sum(stats, "kv_blocks_used"),
            kv_block_tokens=max(batch.block_size for batch in batches) if blocks else None,
            kv_hit_rate=_most(stats, "kv_hit_rate"),
            queued=_sum(stats, "queued"),
            paused=_sum(stats, "paused"),
            iterations=_most(stats, "iterations"),
            iteration_seconds=_most(stats, "iteration_seconds"),
        )


def _known(stats: list[Stats], name: str) -> list[float]:
    return [value for value in map(attrgetter(name), stats) if value is not None]


def _sum(stats: list[Stats], name: str) -> int | None:
    known = _known(stats, name)
    return int(sum(known)) if known else None


def _most(stats: list[Stats], name: str) -> float | None:
    return max(_known(stats, name), default=None)


def _limit(batches: list[RollingBatch], name: str) -> int | None:
    return sum(getattr(batch.limits, name) for batch in batches) if batches else None
