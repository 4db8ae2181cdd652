"""Counters and histograms of the rolling batch. The server turns them into metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from djl_trtllm.request import FinishReason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Histogram:
    """Counts of observations in buckets with fixed upper bounds (the last bucket is open)."""

    def __init__(self, bounds: Sequence[float] = _SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass
class Statistics:
    """Totals since the model was loaded. Durations are in seconds."""

    requests: int = 0
    resumed: int = 0
    """Requests that went on in a new engine process, each as often as it did."""
    last_request_at: float = 0.0
    """When the last request was queued, in seconds since 1970; 0 if there was none."""
    finished: Counter[FinishReason] = field(default_factory=Counter)
    """Sequences by finish reason."""
    prompt_tokens: int = 0
    reused_prompt_tokens: int = 0
    generated_tokens: int = 0
    time_to_first_token: Histogram = field(default_factory=Histogram)
    inter_token_latency: Histogram = field(default_factory=Histogram)
    queue_time: Histogram = field(default_factory=Histogram)
    request_time: Histogram = field(default_factory=Histogram)
