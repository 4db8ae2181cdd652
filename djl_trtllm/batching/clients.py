"""The clients of a rolling batch: how much each one has of it, and how much it was given so far.

A client's *service* is what it was given, in tokens, as in "Fairness in Serving Large Language Models" (Sheng et al.,
OSDI 2024): tokens of prompts, and those of outputs with a larger weight. Sequences that run count with all that they
may still get, so that a client cannot take every place before its first token counts.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

OUTPUT_WEIGHT = 2
"""An output token is an iteration; the tokens of a prompt share one."""

_RECENT_SECONDS = 300.0
_MOST_IDLE = 4096
"""Clients without requests whose service is remembered. One that is forgotten is a new one."""


@dataclass(slots=True, eq=False)
class Client:
    """`admitted` sequences of it wait or run, `running` of them, which take `blocks` of the KV cache.

    It was given `service`, and what runs may get `expected` more, in weighted tokens. Its last request ended at
    `left_at`.
    """

    key: str
    admitted: int = 0
    running: int = 0
    blocks: int = 0
    service: int = 0
    expected: int = 0
    left_at: float = 0.0


class Clients:
    """All clients that have requests, and the last ones that had."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._active: dict[str, Client] = {}
        self._idle: OrderedDict[str, Client] = OrderedDict()
        """The one that left last at the end."""

    def __len__(self) -> int:
        """How many have requests."""
        return len(self._active)

    @property
    def remembered(self) -> int:
        return len(self._idle)

    def find(self, key: str) -> Client:
        """A client that has requests, or may be about to."""
        return self._active.get(key) or self._idle.get(key) or Client(key)

    def admit(self, client: Client, sequences: int) -> None:
        self._active[client.key] = client
        self._idle.pop(client.key, None)
        client.admitted += sequences

    def release(self, client: Client, sequences: int = 1) -> None:
        client.admitted -= sequences
        if not client.admitted:
            del self._active[client.key]
            client.left_at = self._clock()
            self._idle[client.key] = client
            if len(self._idle) > _MOST_IDLE:
                self._idle.popitem(last=False)

    @property
    def crowded(self) -> bool:
        """Whether the client that has requests is not the only one: others have some, or had some of late."""
        if len(self._active) > 1:
            return True
        last = next(reversed(self._idle.values()), None)
        return last is not None and last.left_at > self._clock() - _RECENT_SECONDS

    def has_share(self, client: Client, sequences: int, capacity: int) -> bool:
        """Whether a client has room for more in a queue of this size that others have filled: its share, and no more.

        The queue is longer then, less than twice as long.
        """
        clients = len(self._active) + (client.key not in self._active)
        return clients > 1 and client.admitted + sequences <= capacity // clients
