"""The iteration statistics, as the caller sees them (facts §2.6)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from queue import Empty, Queue
from typing import Any

from .queues import NO_LOOP, AsyncQueue, has_event_loop


class IterationResult:
    """Iteration statistics as they come. Ended by a timeout, it stays ended until the next request (facts §2.6)."""

    def __init__(self) -> None:
        self._done = False
        self._timeout: float | None = 2
        if has_event_loop():
            self.aqueue: AsyncQueue | None = AsyncQueue()
            self.queue: Any = self.aqueue.sync_q
        else:
            self.queue = Queue()
            self.aqueue = None

    def set_timeout(self, timeout: float | None) -> None:
        self._timeout = timeout

    def mark_undone(self) -> None:
        self._done = False

    def get_results(self) -> list[dict[str, Any]]:
        results = []
        while not self._done:
            try:
                results.append(json.loads(self.queue.get(timeout=self._timeout)))
            except Empty:
                self._done = True
        return results

    def __aiter__(self) -> IterationResult:
        return self

    async def __anext__(self) -> dict[str, Any]:
        if self._done:
            raise StopAsyncIteration
        assert self.aqueue is not None, NO_LOOP
        try:
            statistics: dict[str, Any] = json.loads(await self.aqueue.get(timeout=self._timeout))
        except asyncio.TimeoutError:
            self._done = True
            raise StopAsyncIteration from None
        return statistics


async def no_iterations() -> AsyncIterator[dict[str, Any]]:
    """Statistics before the first request."""
    none: list[dict[str, Any]] = []
    for statistics in none:
        yield statistics
