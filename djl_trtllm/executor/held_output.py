"""The output of several iterations as one message."""

from __future__ import annotations

import time
from collections.abc import Callable

from djl_trtllm.executor.protocol import Delta


class HeldOutput:
    """Holds output back until `iterations` have run and `seconds` have gone by, and merges it for each sequence.

    The beginning of a sequence does not wait, because a client waits for it, nor does its end, because its place is
    free then.
    """

    def __init__(self, iterations: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._iterations = iterations
        self._seconds = seconds
        self._clock = clock
        self._deltas: dict[int, Delta] = {}
        self._begun: set[int] = set()
        self._waited = 0
        self._sent_all_at = clock()

    def add(self, deltas: list[Delta]) -> list[Delta]:
        """Take the output of an iteration; returns what is to be sent after it."""
        if self._iterations == 1 and not self._seconds:
            return deltas
        held, begun = self._deltas, self._begun
        urgent: list[int] = []
        for delta in deltas:
            request_id = delta.request_id
            earlier = held.setdefault(request_id, delta)
            if earlier is not delta:
                earlier.add(delta.token_ids, delta.logprobs)
                earlier.finish, earlier.error = delta.finish, delta.error
            if delta.finish:
                begun.discard(request_id)
                urgent.append(request_id)
            elif request_id not in begun:
                begun.add(request_id)
                urgent.append(request_id)
        self._waited += 1
        if self._waited >= self._iterations and self._clock() - self._sent_all_at >= self._seconds:
            return self.take_all()
        return [held.pop(request_id) for request_id in urgent]

    def take_all(self) -> list[Delta]:
        """What is held back, to be sent now."""
        deltas, self._deltas = list(self._deltas.values()), {}
        self._waited, self._sent_all_at = 0, self._clock()
        return deltas
