"""What happened during one wake-up of an event loop, sent as one message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from djl_trtllm.executor.protocol import Delta, Logprob, Stats, Step


class Source(Protocol):
    """Something that has output for the buffer."""

    def collect(self) -> None:
        """Put in what is new."""


class StepBuffer:
    """Collects deltas, merged per request, and sends them when the tasks that are awake have had their turn.

    However many tasks an engine's iteration wakes, and however large a backlog each finds, it becomes one `Step`.
    `send` may block while the server is slow, and with it the loop. Must be made on the loop.
    """

    def __init__(self, send: Callable[[Step], None], stats: Callable[[], Stats]) -> None:
        self.sent = 0
        """Messages so far."""
        self._send = send
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._deltas: dict[int, Delta] = {}
        self._sources: list[Source] = []
        self._scheduled = False

    def extend(self, request_id: int, token_ids: list[int], logprobs: list[Logprob] | None) -> Delta:
        """Add tokens of a request, whose list is the buffer's from now on; the delta they go into."""
        delta = self._deltas.get(request_id)
        if delta is None:
            delta = self._deltas[request_id] = Delta(request_id, token_ids, logprobs)
            if not self._scheduled:
                self._schedule()
            return delta
        delta.add(token_ids, logprobs)
        return delta

    def collect_from(self, source: Source) -> None:
        """Ask a source once, before the next message is sent: of a backlog it then makes one delta."""
        self._sources.append(source)
        if not self._scheduled:
            self._schedule()

    def flush(self) -> None:
        """Send now, also where there is nothing new: a sign of life."""
        self._collect()
        deltas, self._deltas = list(self._deltas.values()), {}
        self._send(Step(deltas, self._stats()))
        self.sent += 1

    def _schedule(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._end_wake_up)

    def _end_wake_up(self) -> None:
        self._scheduled = False
        self._collect()
        if self._deltas:
            self.flush()

    def _collect(self) -> None:
        sources, self._sources = self._sources, []
        for source in sources:
            source.collect()
