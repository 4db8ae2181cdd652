"""How many replicas a fleet should have."""

import math
import re
from typing import Any, NamedTuple

from djl_trtllm.errors import ConfigError

_AUTOSCALE = re.compile(r"([1-9]\d{0,4}):([1-9]\d{0,4})(?::([1-9]\d{0,4}))?", re.ASCII)
_FULL_CACHE = 0.95
"""Above this utilisation of its KV cache an engine pauses sequences, even in small batches."""


def target_concurrency(batch_size: float) -> int:
    """The sequences at a time above which another replica is started, before any has to wait."""
    return max(1, round(0.7 * batch_size))


class Autoscaling(NamedTuple):
    """From `least` to `most` replicas, each with `concurrency` sequences at the same time.

    `concurrency` None: the `target_concurrency` of the batch that the replicas report.
    """

    least: int
    most: int
    concurrency: int | None

    @classmethod
    def parse(cls, text: str) -> "Autoscaling":
        """Read `MIN:MAX[:CONCURRENCY]`. Raises ConfigError."""
        found = _AUTOSCALE.fullmatch(text)
        least, most, concurrency = (int(each or 0) for each in found.groups()) if found else (1, 0, 0)
        if least > most:
            raise ConfigError(
                [
                    f"autoscale={text}: expected MIN:MAX or MIN:MAX:CONCURRENCY, such as 1:4:45, whole numbers from 1 "
                    "to 99999 of which MIN is at most MAX"
                ]
            )
        return cls(least, most, concurrency or None)


class QueueAndCachePolicy:
    """Ray Serve's autoscaling policy: replicas = sequences that wait or run / `concurrency`, rounded up.

    A replica whose KV cache is full counts as one that has twice as many. Ray applies the delays of its configuration
    to what this returns. A decision adds two replicas or doubles them, and ends a fifth of them, at most: the queue of
    a moment says little about how many will be needed once new replicas have loaded their model.

    Without a `concurrency`, the policy takes the `target_concurrency` of the largest batch that a replica reports as
    its `places`: only there it is known which engine runs the model. Until one has reported, there are as many replicas
    as before.
    """

    def __init__(self, concurrency: int | None = None) -> None:
        self._concurrency = concurrency

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas for Ray's `AutoscalingContext`, and no state."""
        metrics = context.aggregated_metrics or {}
        load = sum(sum(metrics.get(name, {}).values()) for name in ("waiting", "running"))
        full = sum(usage >= _FULL_CACHE for usage in metrics.get("kv_usage", {}).values())
        places = max(metrics.get("places", {}).values(), default=0.0)
        concurrency = self._concurrency or (target_concurrency(places) if places else None)
        present = context.current_num_replicas
        wanted = present if concurrency is None else math.ceil(load / concurrency)
        if full:
            wanted = max(wanted, present + full)
        wanted = max(present - max(1, present // 5), min(max(present + 2, 2 * present), wanted))
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return max(least, min(most, wanted)), {}
