"""TensorRT-LLM's statistics of an iteration, as far as they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djl_trtllm.executor.protocol import Stats


class IterationStatistics:
    """The last iteration that the engine reported (keys: `IterationStats` of TensorRT-LLM's executor)."""

    def __init__(self) -> None:
        self._last: Mapping[str, Any] = {}

    def take(self, iteration: Mapping[str, Any]) -> None:
        self._last = iteration

    def stats(self, running: int) -> Stats:
        """With the number of requests in the engine, which is known without it. Without any, what they used is free."""
        last = self._last
        cache = last.get("kvCacheStats") or {}
        batch = last.get("inflightBatchingStats") or {}
        total = int(cache.get("maxNumBlocks") or 0)
        used = int(cache.get("usedNumBlocks") or 0) if running else 0
        queued = int(last.get("numQueuedRequests") or 0) if running else 0
        return Stats(
            running=max(0, running - queued),
            kv_usage=used / total if total else 0.0,
            queued=queued,
            paused=int(batch.get("numPausedRequests") or 0) if running else 0,
            iterations=int(last.get("iter") or 0),
            iteration_seconds=float(last.get("iterLatencyMS") or 0.0) / 1000,
            kv_blocks=total,
            kv_blocks_used=used,
            kv_hit_rate=float(cache.get("cacheHitRate") or 0.0),
        )
