"""A replica: a queue, the places of a batch, and an engine that gives each running sequence a token in every step."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from benchmarks.fleet.arrivals import Request

_ABOUT_NOW = 1e-9


class Speed(Protocol):
    """How fast an engine is."""

    def step_seconds(self, running: int) -> float:
        """Seconds of an iteration with this number of sequences."""
        ...

    def prefill_seconds(self, prompt_tokens: int) -> float:
        """How long a new sequence holds up all others."""
        ...


@dataclass(frozen=True)
class Gpu:
    """Tokens per second of a sequence that is alone, of a full batch together, and of prompts."""

    alone: float
    full: float
    batch: int
    prefill: float

    def step_seconds(self, running: int) -> float:
        """Seconds of an iteration; between both measured points they grow with the number of sequences."""
        least, most = 1 / self.alone, self.batch / self.full
        return least + (most - least) * (running - 1) / max(1, self.batch - 1)

    def prefill_seconds(self, prompt_tokens: int) -> float:
        return prompt_tokens / self.prefill


@dataclass(frozen=True)
class Scripted:
    """The scripted executor: a fixed number of steps per second, whatever runs."""

    steps_per_second: float

    def step_seconds(self, running: int) -> float:
        return 1 / self.steps_per_second

    def prefill_seconds(self, prompt_tokens: int) -> float:
        return 0.0


class Replica:
    """`places` sequences run at a time, `queue` wait.

    All that run advance together, so progress is one number, the tokens that each has got: a sequence ends when it
    reaches the value that it had at its start plus its own tokens.
    """

    def __init__(self, speed: Speed, places: int, queue: int) -> None:
        self.speed, self.places, self.queue = speed, places, queue
        self.waiting: deque[Request] = deque()
        self.running: list[tuple[float, int, Request]] = []
        self.ready = False
        self.draining = False
        self.changes = 0
        """A counter of the changes that make an earlier `next_end` wrong."""
        self._tokens = 0.0
        self._at = 0.0
        self._started = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: Request, now: float) -> bool:
        """Take a request, or refuse it."""
        if len(self.running) >= self.places and len(self.waiting) >= self.queue:
            request.outcome, request.ended = "refused", now
            return False
        self.waiting.append(request)
        # It joins at the next iteration: half of one away on average.
        self._start(now, 0.5)
        return True

    def _start(self, now: float, joins: float) -> None:
        """Give free places to those that wait. In a number of iterations they join those that run."""
        while self.waiting and len(self.running) < self.places:
            self._advance(now)
            request = self.waiting.popleft()
            request.started = now
            later = joins if self.running else 0.0
            self._started += 1
            ends = self._tokens + later + request.output_tokens
            heapq.heappush(self.running, (ends, self._started, request))
            self._at = max(self._at, now) + self.speed.prefill_seconds(request.prompt_tokens)
            request.first_token = self._at + (1 + later) * self.speed.step_seconds(len(self.running))
            self.changes += 1

    def next_end(self, now: float) -> float | None:
        """When the next sequence ends, if nothing else happens before."""
        if not self.running:
            return None
        self._advance(now)
        return max(self._at, now) + (self.running[0][0] - self._tokens) * self.speed.step_seconds(len(self.running))

    def end_due(self, now: float) -> list[Request]:
        """Sequences that end now. Their places go to those that wait."""
        self._advance(now)
        ended = []
        while self.running and self.running[0][0] <= self._tokens + _ABOUT_NOW * max(1.0, self._tokens):
            request = heapq.heappop(self.running)[2]
            request.ended, request.outcome = now, "complete"
            ended.append(request)
        self.changes += bool(ended)
        # The next iteration begins before the server has learned of the end.
        self._start(now, 1.0)
        return ended

    def cut(self, now: float) -> list[Request]:
        """End all that is left."""
        left = [*self.waiting, *(request for _, _, request in self.running)]
        for request in left:
            request.ended, request.outcome = now, "cut"
        self.waiting.clear()
        self.running.clear()
        self.changes += 1
        return left

    def _advance(self, now: float) -> None:
        """Progress until now. `_at` is in the future while a prompt is processed."""
        if now > self._at:
            if self.running:
                self._tokens += (now - self._at) / self.speed.step_seconds(len(self.running))
            self._at = now
