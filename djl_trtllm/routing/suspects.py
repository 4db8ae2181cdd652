"""Requests that end replicas, known by what each replica had been sent a short time before it died.

A request that ends the engine alone is found by the replica itself (`batching.blame`). This is for what ends the whole
server process, such as a body on which a library of native code fails. It is given to two replicas at most.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable

RECENT_SECONDS = 10.0
"""A replica's death is a suspicion against what it was sent in this time before it."""
DEATHS = 2
"""Replicas that a request may end before it is refused."""
REFUSED_SECONDS = 600.0
_MOST_SENT = 10_000
_MOST_SUSPECTS = 10_000


class Suspects:
    """Requests by a digest of their body."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[str, deque[tuple[float, str]]] = {}
        self._deaths: OrderedDict[str, tuple[float, frozenset[str]]] = OrderedDict()

    def sent(self, digest: str, replica: str) -> None:
        """A request went to a replica."""
        now = self._clock()
        sent = self._sent.setdefault(replica, deque(maxlen=_MOST_SENT))
        sent.append((now, digest))
        while sent[0][0] < now - RECENT_SECONDS:
            sent.popleft()

    def died(self, replica: str) -> set[str]:
        """The process of a replica has ended although nobody wanted that; what it was sent shortly before."""
        since = self._clock() - RECENT_SECONDS
        accused = {digest for at, digest in self._sent.pop(replica, ()) if at >= since}
        self.accuse(accused, replica)
        return accused

    def accuse(self, digests: Iterable[str], replica: str) -> None:
        """These requests were in a replica that died, as this router or another one knows."""
        now = self._clock()
        for digest in digests:
            before = frozenset() if self._is_over(digest, now) else self._deaths[digest][1]
            self._deaths[digest] = (now, before | {replica})
            self._deaths.move_to_end(digest)
        while len(self._deaths) > _MOST_SUSPECTS:
            self._deaths.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Other replicas than these are there no more."""
        for name in self._sent.keys() - replicas:
            del self._sent[name]

    def refused_for(self, digest: str) -> float:
        """Seconds for which a request is refused; 0 if it is not."""
        now = self._clock()
        if self._is_over(digest, now) or len(self._deaths[digest][1]) < DEATHS:
            return 0.0
        return self._deaths[digest][0] + REFUSED_SECONDS - now

    def _is_over(self, digest: str, now: float) -> bool:
        return digest not in self._deaths or now - self._deaths[digest][0] >= REFUSED_SECONDS
