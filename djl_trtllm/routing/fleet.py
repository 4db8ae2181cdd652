"""The replicas of a fleet, and which of them gets a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from djl_trtllm.routing.affinity import Affinity, prefix_keys, ranked
from djl_trtllm.routing.suspects import Suspects

_SILENT_SECONDS = 3.0
"""A replica that does not answer a health check for this time gets no new request until it does."""
_PAUSE_SECONDS = 1.0
_CHECK = b"GET /-/healthz HTTP/1.1\r\nHost: replica\r\n\r\n"


class Load(NamedTuple):
    """The last report of a replica: requests that wait and run, and how many it has received so far."""

    requests: int = 0
    received: int = 0


@dataclass
class Question:
    """A request that is to be routed, and the answer: the replica, and for how many seconds it is refused there."""

    keys: tuple[bytes, ...]
    session: str
    digest: str
    replica: str = ""
    refused_for: float = 0.0

    @classmethod
    def of(cls, body: bytes, session: str = "", truncated: str = "") -> Question:
        """`body` may be a beginning; what is said in `truncated` then distinguishes it from others that begin alike."""
        return cls(prefix_keys(body), session, blake2b(body + truncated.encode(), digest_size=8).hexdigest())


class Fleet:
    """Sends a session to its replica, and a prompt to one that had its beginning, while that is not out of balance.

    Others go to the least loaded one. A replica's load is what it has reported last, with what it was sent since beyond
    the usual. One that does not answer gets nothing, if others do. `slack` is that of `Affinity`.
    """

    def __init__(
        self,
        slack: int,
        on_death: Callable[[set[str], str], object] = lambda digests, replica: None,
        on_detour: Callable[[bytes, str], object] = lambda key, replica: None,
    ) -> None:
        """Callbacks get news for other routers: `on_death` the digests of what a replica was sent before its process
        ended, `on_detour` the longest key of a new prompt that did not go where all routers would send it."""
        self._on_death = on_death
        self._on_detour = on_detour
        self._affinity = Affinity(slack)
        self._suspects = Suspects()
        self._sent: Counter[str] = Counter()
        self._received: dict[str, int] = {}
        self._usual: Counter[str] = Counter()
        """Requests that each replica received between its last two reports."""
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()

    def update(self, replicas: Mapping[str, tuple[str, int]], present: Collection[str]) -> None:
        """Replicas have come or gone: host and port of each that has an address, by its name, and the names of all.

        Whatever is known of others is forgotten. Call it in the event loop.
        """
        for name in self._watches.keys() - replicas.keys():
            self._watches.pop(name).cancel()
            self._silent.discard(name)
        for name in {*self._sent, *self._received}.difference(present):
            self._received.pop(name, None)
            del self._sent[name], self._usual[name]
        self._suspects.keep(present)
        for name in replicas.keys() - self._watches.keys():
            self._watches[name] = asyncio.get_running_loop().create_task(self._watch(name, *replicas[name]))

    def route(self, question: Question, loads: Mapping[str, Load]) -> None:
        """Answer the question, or note the answer that another one has given. `loads` has all replicas."""
        if not question.replica:
            question.refused_for = self._suspects.refused_for(question.digest)
            counts = {name: self._count(name, load) for name, load in loads.items()}
            answering = {name: count for name, count in counts.items() if name not in self._silent}
            question.replica = self._chosen(question, answering or counts)
        if question.refused_for:
            return
        self._suspects.sent(question.digest, question.replica)
        self._affinity.learn(question.keys, question.replica)
        self._sent[question.replica] += 1

    def accuse(self, digests: Iterable[str], replica: str) -> None:
        """Another router has found that a replica died, and had sent these requests there."""
        self._suspects.accuse(digests, replica)

    def _died(self, name: str) -> None:
        if digests := self._suspects.died(name):
            self._on_death(digests, name)

    def learn(self, key: bytes, replica: str) -> None:
        """Another router has sent a prompt with this key there."""
        self._affinity.learn([key], replica)

    def _chosen(self, question: Question, counts: Mapping[str, int]) -> str:
        if question.session:
            return ranked(question.session.encode(), counts)[0]
        keys = question.keys
        chosen = self._affinity.choose(keys, counts) or min(counts, key=counts.__getitem__)
        if keys and not self._affinity.knows(keys) and chosen != ranked(keys[0], counts)[0]:
            self._on_detour(keys[-1], chosen)
        return chosen

    def _count(self, name: str, load: Load) -> int:
        """Requests of a replica now: of what it was sent since its report, as many have ended as came before that."""
        if load.received != (before := self._received.get(name)):
            self._usual[name] = 0 if before is None else load.received - before
            self._received[name] = load.received
            self._sent[name] = 0
        return load.requests + max(0, self._sent[name] - self._usual[name])

    async def _watch(self, name: str, host: str, port: int) -> None:
        """Follow whether a replica answers, and notice at once when its process ends.

        Nothing is said about one that has never answered: it may be that it cannot be reached from here.
        """
        has_answered = False

        def answered() -> None:
            nonlocal has_answered
            has_answered = True
            self._silent.discard(name)

        before = _End.NONE
        while True:
            try:
                end = await _follow(host, port, answered)
            except (OSError, asyncio.TimeoutError) as error:
                if has_answered:
                    self._silent.add(name)
                    if isinstance(error, ConnectionRefusedError):
                        self._died(name)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if has_answered and before is end is _End.UNANSWERED:
                self._silent.add(name)
            # After one early end, the next connection says at once whether the process has ended.
            if _End.NONE not in (before, end):
                await asyncio.sleep(_PAUSE_SECONDS)
            before = end


class _End(Enum):
    """How the replica has ended a connection: not before the pause was over, after its answer, or without one."""

    NONE = 0
    ANSWERED = 1
    UNANSWERED = 2


async def _follow(host: str, port: int, answered: Callable[[], None]) -> _End:
    """Check a replica once and wait for a pause, or until its connection ends.

    Raises ConnectionRefusedError if its process has ended, TimeoutError or another OSError if it is silent.
    """
    end = _End.UNANSWERED
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), _SILENT_SECONDS)
    try:
        writer.write(_CHECK)
        # Where the connection ends, the next one says why.
        with contextlib.suppress(ConnectionResetError):
            if await asyncio.wait_for(reader.readline(), _SILENT_SECONDS):
                answered()
                end = _End.ANSWERED
                try:
                    await asyncio.wait_for(reader.read(), _PAUSE_SECONDS)
                except asyncio.TimeoutError:
                    end = _End.NONE
    finally:
        writer.close()
    return end
