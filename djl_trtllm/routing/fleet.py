"""The replicas of a fleet, and which of them gets a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import NamedTuple

from djl_trtllm.routing.affinity import Affinity, PromptKeys, ranked
from djl_trtllm.routing.suspects import Suspects

_CHECK = b"GET /-/healthz HTTP/1.1\r\nHost: replica\r\n\r\n"
_MOST_TURNS = 10_000


class Load(NamedTuple):
    """The last report of a replica: requests that wait and run, and how many it has received so far."""

    requests: int = 0
    received: int = 0


@dataclass
class Question:
    """A request that is to be routed, and the answer: the replica, and for how many seconds it is refused there."""

    prompt: PromptKeys
    session: str
    digest: str
    replica: str = ""
    refused_for: float = 0.0

    @classmethod
    def of(cls, body: bytes, session: str = "", truncated: str = "") -> Question:
        """`body` may be a beginning; what is said in `truncated` then distinguishes it from others that begin alike."""
        return cls(PromptKeys.of(body), session, blake2b(body + truncated.encode(), digest_size=8).hexdigest())


@dataclass
class _Replica:
    """What a router knows of a replica since its last report, and whether it answers.

    A turn of a conversation says that the turn before it has ended: `turns` counts it where it went, and takes one off
    where that was. Of other requests, `new`, as many have ended since the report as came before it, `usual`.
    """

    received: int | None = None
    new: int = 0
    usual: int = 0
    turns: int = 0
    watch: asyncio.Task[None] | None = None
    silent: bool = False

    def requests(self, load: Load) -> int:
        """Requests that wait and run now."""
        if load.received != self.received:
            self.usual = 0 if self.received is None else self.new
            self.received, self.new, self.turns = load.received, 0, 0
        return max(0, load.requests + max(0, self.new - self.usual) + self.turns)

    def forget(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        self.watch, self.silent = None, False


class Fleet:
    """Sends a session to its replica, and a prompt to one that had its beginning, while that is not out of balance.

    Others go to the least loaded one. One that has not answered a health check for `silent_seconds` gets nothing, if
    others do; it is checked every `pause_seconds`. `slack` is that of `Affinity`.
    """

    def __init__(
        self,
        slack: int,
        on_death: Callable[[set[str], str], object] = lambda digests, replica: None,
        on_detour: Callable[[bytes, str], object] = lambda key, replica: None,
        *,
        silent_seconds: float = 3.0,
        pause_seconds: float = 1.0,
    ) -> None:
        """Callbacks get news for other routers: `on_death` the digests of what a replica was sent before its process
        ended, `on_detour` the longest key of a new prompt that did not go where all routers would send it."""
        self._on_death = on_death
        self._on_detour = on_detour
        self._silent_seconds = silent_seconds
        self._pause_seconds = pause_seconds
        self._affinity = Affinity(slack)
        self._suspects = Suspects()
        self._replicas: dict[str, _Replica] = {}
        self._turns: OrderedDict[bytes, str] = OrderedDict()
        """Where the last turn of each conversation went, by the key of its whole prompt."""

    def update(self, replicas: Mapping[str, tuple[str, int]], present: Collection[str]) -> None:
        """Replicas have come or gone: host and port of each that has an address, by its name, and the names of all.

        Whatever is known of others is forgotten. Call it in the event loop.
        """
        for name, replica in list(self._replicas.items()):
            if name not in replicas:
                replica.forget()
            if name not in present:
                del self._replicas[name]
        self._suspects.keep(present)
        for name, address in replicas.items():
            replica = self._replica(name)
            if replica.watch is None:
                replica.watch = asyncio.get_running_loop().create_task(self._watch(name, replica, *address))

    def route(self, question: Question, loads: Mapping[str, Load]) -> None:
        """Answer the question, or note the answer that another one has given. `loads` has all replicas."""
        # HAProxy's second try is the same turn, whose prompt is not known there.
        before = self._turn_before(question.prompt)
        if before in loads:
            self._replica(before).turns -= 1
        if not question.replica:
            question.refused_for = self._suspects.refused_for(question.digest)
            counts = {name: self._replica(name).requests(load) for name, load in loads.items()}
            answering = {name: count for name, count in counts.items() if not self._replica(name).silent}
            question.replica = self._chosen(question, answering or counts)
        if question.refused_for:
            return
        self._suspects.sent(question.digest, question.replica)
        self._affinity.learn(question.prompt.beginnings, question.replica)
        if before in loads:
            self._replica(question.replica).turns += 1
        else:
            self._replica(question.replica).new += 1
        for end in question.prompt.ends[-1:]:
            self._turns[end] = question.replica
        while len(self._turns) > _MOST_TURNS:
            self._turns.popitem(last=False)

    def accuse(self, digests: Iterable[str], replica: str) -> None:
        """Another router has found that a replica died, and had sent these requests there."""
        self._suspects.accuse(digests, replica)

    def learn(self, key: bytes, replica: str) -> None:
        """Another router has sent a prompt with this key there."""
        self._affinity.learn([key], replica)

    def _died(self, name: str) -> None:
        if digests := self._suspects.died(name):
            self._on_death(digests, name)

    def _replica(self, name: str) -> _Replica:
        return self._replicas.setdefault(name, _Replica())

    def _turn_before(self, prompt: PromptKeys) -> str:
        """Where the turn went that this prompt goes on from, or "". No other prompt goes on from it."""
        ends = (end for end in reversed(prompt.ends[:-1]) if end in self._turns)
        return next((self._turns.pop(end) for end in ends), "")

    def _chosen(self, question: Question, counts: Mapping[str, int]) -> str:
        if question.session:
            return ranked(question.session.encode(), counts)[0]
        keys = question.prompt.beginnings
        chosen = self._affinity.choose(keys, counts) or min(counts, key=counts.__getitem__)
        if keys and not self._affinity.knows(keys) and chosen != ranked(keys[0], counts)[0]:
            self._on_detour(keys[-1], chosen)
        return chosen

    async def _watch(self, name: str, replica: _Replica, host: str, port: int) -> None:
        """Follow whether a replica answers, and notice at once when its process ends.

        Nothing is said about one that has never answered: it may be that it cannot be reached from here.
        """
        has_answered = False

        def answered() -> None:
            nonlocal has_answered
            has_answered = True
            replica.silent = False

        before = _End.NONE
        while True:
            try:
                end = await self._follow(host, port, answered)
            except (OSError, asyncio.TimeoutError) as error:
                replica.silent = has_answered
                if has_answered and isinstance(error, ConnectionRefusedError):
                    self._died(name)
                await asyncio.sleep(self._pause_seconds)
                continue
            if has_answered and before is end is _End.UNANSWERED:
                replica.silent = True
            # After one early end, the next connection says at once whether the process has ended.
            if _End.NONE not in (before, end):
                await asyncio.sleep(self._pause_seconds)
            before = end

    async def _follow(self, host: str, port: int, answered: Callable[[], None]) -> _End:
        """Check a replica once and wait for a pause, or until its connection ends.

        Raises ConnectionRefusedError if its process has ended, TimeoutError or another OSError if it is silent.
        """
        end = _End.UNANSWERED
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), self._silent_seconds)
        try:
            writer.write(_CHECK)
            # Where the connection ends, the next one says why.
            with contextlib.suppress(ConnectionResetError):
                if await asyncio.wait_for(reader.readline(), self._silent_seconds):
                    answered()
                    end = _End.ANSWERED
                    try:
                        await asyncio.wait_for(reader.read(), self._pause_seconds)
                    except asyncio.TimeoutError:
                        end = _End.NONE
        finally:
            writer.close()
        return end


class _End(Enum):
    """How the replica has ended a connection: not before the pause was over, after its answer, or without one."""

    NONE = 0
    ANSWERED = 1
    UNANSWERED = 2
