"""How many replicas a cluster needs, by what the replicas have to do."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_FULL_CACHE = 0.95
"""A KV cache that is as full pauses sequences, however few there are."""


class QueueAndCachePolicy:
    """Ray Serve's autoscaling policy: as many replicas as keep `concurrency` sequences on each.

    A replica whose KV cache is full counts as one that has twice as many. Ray applies the delays of its configuration
    to what this returns. A decision adds two replicas or doubles them, and ends a fifth of them, at most: the queue of
    a moment says little about how many will be needed once new replicas have loaded their model.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state."""
        metrics = context.aggregated_metrics or {}
        load = sum(sum(metrics.get(name, {}).values()) for name in ("waiting", "running"))
        full = sum(usage >= _FULL_CACHE for usage in metrics.get("kv_usage", {}).values())
        wanted = math.ceil(load / self._concurrency)
        present = context.current_num_replicas
        if full:
            wanted = max(wanted, present + full)
        wanted = max(present - max(1, present // 5), min(max(present + 2, 2 * present), wanted))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}
