"""The statistics of an iteration, as JSON has them."""

from __future__ import annotations

import time
from typing import Any

from .scheduler import Scheduler
from .sequence import Sequence
from .worker_settings import WorkerSettings


def describe_iteration(
    *,
    settings: WorkerSettings,
    scheduler: Scheduler,
    number: int,
    seconds: float,
    scheduled: int,
    contexts: list[Sequence],
    fetched: int,
    completed: int,
) -> dict[str, Any]:
    paused, scheduler.paused = scheduler.paused, 0
    return {
        "cpuMemUsage": 0,
        "gpuMemUsage": 0,
        "pinnedMemUsage": 0,
        "iter": number,
        "iterLatencyMS": seconds * 1e3,
        "newActiveRequestsQueueLatencyMS": 0.0,
        "maxBatchSizeRuntime": settings.max_batch_size,
        "maxBatchSizeStatic": settings.max_batch_size,
        "maxBatchSizeTunerRecommended": 0,
        "maxNumActiveRequests": settings.max_batch_size,
        "maxNumTokensRuntime": settings.max_num_tokens,
        "maxNumTokensStatic": settings.max_num_tokens,
        "maxNumTokensTunerRecommended": 0,
        "numActiveRequests": len(scheduler.active) + completed,
        "numCompletedRequests": completed,
        "numNewActiveRequests": fetched,
        # PyExecutor's `request_queue.qsize()`: its inbox, which an iteration empties; those that wait are elsewhere.
        "numQueuedRequests": 0 if settings.pytorch else len(scheduler.waiting),
        "timestamp": time.strftime("%m-%d-%Y %H:%M:%S.000000"),
        "kvCacheStats": scheduler.cache.statistics(),
        "inflightBatchingStats": {
            "avgNumDecodedTokensPerIter": 1.0,
            "microBatchId": 0,
            "numContextRequests": len(contexts),
            "numCtxTokens": sum(len(sequence.prompt) for sequence in contexts),
            "numGenRequests": scheduled - len(contexts),
            "numPausedRequests": paused,
            "numScheduledRequests": scheduled,
        },
    }
