"""Finds the knee: the smallest number of clients at which the server generates nearly as much as it can."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from djl_trtllm.bench.figures import Figures

GAIN = 1.05
"""Twice as many clients have to bring this factor of throughput, or the server is saturated."""
SHARE = 0.95
"""Of the throughput of the saturated server: what is nearly as much."""
PRECISION = 1.1
"""Ratio of the numbers of clients between which the knee is."""

Measure = Callable[[int], Awaitable[Figures]]


@dataclass
class Sweep:
    """What was measured, by number of clients."""

    points: dict[int, Figures] = field(default_factory=dict)
    knee: int | None = None
    """None: throughput still grew at the largest number, or the sweep was interrupted."""

    @property
    def capacity(self) -> float:
        """The throughput of the saturated server in tokens per second: the mean of those near the highest."""
        speeds = [figures.tokens_per_second for figures in self.points.values()]
        near = [speed for speed in speeds if speed >= SHARE * max(speeds)]
        return sum(near) / len(near) if near else 0.0

    def bracket(self) -> tuple[int, int] | None:
        """The numbers of clients next to the knee: below it, and the first at or above it."""
        enough = [n for n, figures in self.points.items() if figures.tokens_per_second >= SHARE * self.capacity]
        below = [n for n in self.points if n < min(enough, default=0)]
        return (max(below, default=0), min(enough)) if enough else None


async def find_knee(measure: Measure, most: int, sweep: Sweep) -> None:
    """Measure with 1, 2, 4, ... clients until that brings no more, then between the two numbers around the knee.

    `sweep` has what was measured at any time.
    """
    if not await _climb(measure, most, sweep):
        return
    while (bracket := sweep.bracket()) is not None:
        low, high = bracket
        if high - low <= 1 or high <= PRECISION * low:
            sweep.knee = high
            return
        between = min(high - 1, max(low + 1, round(math.sqrt(low * high))))
        if not await _measure(measure, between, sweep):
            return


async def _climb(measure: Measure, most: int, sweep: Sweep) -> bool:
    """Whether the server is saturated with at most `most` clients."""
    clients = 1
    while True:
        before = sweep.capacity
        if not await _measure(measure, clients, sweep):
            return False
        if sweep.points[clients].tokens_per_second < GAIN * before:
            return True
        if clients >= most:
            return False
        clients = min(most, 2 * clients)


async def _measure(measure: Measure, clients: int, sweep: Sweep) -> bool:
    """Whether the load ran to its end."""
    figures = await measure(clients)
    if not figures.complete:
        if figures.sent:
            sweep.points[clients] = figures
        return False
    sweep.points[clients] = figures
    return True
