"""How many replicas a fleet should have."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from djl_trtllm.errors import ConfigError

_AUTOSCALE = re.compile(r"([1-9]\d{0,4}):([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", re.ASCII)
_FULL_CACHE = 0.95
"""Above this utilisation of its KV cache an engine pauses sequences, even in small batches."""


def target_concurrency(batch_size: int) -> int:
    """Return how many sequences a replica is to have; with more, another one is started before they have to wait."""
    return max(1, round(0.7 * batch_size))


class Autoscaling(NamedTuple):
    """From `least` to `most` replicas, with as many sequences at the same time on each of them as `concurrency`."""

    least: int
    most: int
    concurrency: int

    @classmethod
    def parse(cls, text: str, batch_size: int) -> Autoscaling:
        """Read `MIN:MAX[:CONCURRENCY]`; CONCURRENCY is `target_concurrency` by default. Raises ConfigError."""
        found = _AUTOSCALE.fullmatch(text)
        least, most, concurrency = (int(each or 0) for each in found.groups()) if found else (1, 0, 0)
        if least > most:
            raise ConfigError(
                [
                    f"autoscale={text}: expected MIN:MAX or MIN:MAX:CONCURRENCY, such as 1:4:45, whole numbers from 1 "
                    "to 99999 of which MIN is at most MAX"
                ]
            )
        return cls(least, most, concurrency or target_concurrency(batch_size))


class QueueAndCachePolicy:
    """Ray Serve's autoscaling policy: replicas = sequences that wait or run / `concurrency`, rounded up.

    A replica whose KV cache is full counts as one that has twice as many. Ray applies the delays of its configuration
    to what this returns. A decision adds two replicas or doubles them, and ends a fifth of them, at most: the queue of
    a moment says little about how many will be needed once new replicas have loaded their model.
    """

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Ray's `AutoscalingContext`, and no state."""
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
