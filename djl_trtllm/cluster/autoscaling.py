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
    to what this returns.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, and no state."""
        metrics = context.aggregated_metrics or {}
        load = sum(sum(metrics.get(name, {}).values()) for name in ("waiting", "running"))
        full = sum(usage >= _FULL_CACHE for usage in metrics.get("kv_usage", {}).values())
        wanted = math.ceil(load / self._concurrency)
        if full:
            wanted = max(wanted, context.current_num_replicas + full)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}
