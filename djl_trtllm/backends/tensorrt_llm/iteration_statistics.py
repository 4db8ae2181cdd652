"""TensorRT-LLM's statistics of an iteration, as far as they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from djl_trtllm.executor.protocol import Stats


class IterationStatistics:
    """The last iteration that the engine reported (keys: `IterationStats` of TensorRT-LLM's executor).

    `counts_queued`: PyExecutor's `numQueuedRequests` is the inbox of its loop, which an iteration empties. What waits
    in it are the requests that are not active.
    """

    def __init__(self, *, counts_queued: bool = True) -> None:
        self._counts_queued = counts_queued
        self._last: Mapping[str, Any] = {}

    def take(self, iteration: Mapping[str, Any]) -> None:
        self._last = iteration

    def stats(self, running: int) -> Stats:
        """With the number of requests in the engine, which is known without it. Without any, what they used is free."""
        last = self._last
        cache = last.get("kvCacheStats") or {}
        batch = last.get("inflightBatchingStats") or {}
        total = cache.get("maxNumBlocks") or None
        used, queued, paused = (
            value if running or value is None else 0
            for value in (cache.get("usedNumBlocks"), self._queued(running), batch.get("numPausedRequests"))
        )
        milliseconds = last.get("iterLatencyMS")
        return Stats(
            running=max(0, running - (queued or 0)),
            kv_usage=None if total is None or used is None else used / total,
            queued=queued,
            paused=paused,
            iterations=last.get("iter"),
            iteration_seconds=None if milliseconds is None else milliseconds / 1000,
            kv_blocks=total,
            kv_blocks_used=None if total is None else used,
            kv_hit_rate=cache.get("cacheHitRate"),
        )

    def _queued(self, running: int) -> int | None:
        queued: int | None = self._last.get("numQueuedRequests")
        active: int | None = self._last.get("numActiveRequests")
        if self._counts_queued or active is None:
            return queued
        return max(queued or 0, running - active)
