"""The replicas of a fleet, and which of them gets a request."""

import asyncio
import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from math import inf
from typing import NamedTuple

from djl_trtllm.routing.affinity import Affinity, PromptKeys, ranked

_CHECK = b"GET /-/healthz HTTP/1.1\r\nHost: replica\r\n\r\n"
_MOST_TURNS = 10_000
_SLACK = 4


class Load(NamedTuple):
    """The last report of a replica.

    `requests` wait and run, `received` is how many came so far, and `places` how many run at most (0: not known).
    """

    requests: int = 0
    received: int = 0
    places: int = 0


@dataclass
class Question:
    """A request that is to be routed, and the answer: the replica, and for how many seconds it is refused there."""

    prompt: PromptKeys
    session: str
    digest: str
    replica: str = ""
    refused_for: float = 0.0

    @classmethod
    def of(cls, body: bytes, session: str = "", truncated: str = "") -> "Question":
        """A question; `body` may be a beginning only, then `truncated` distinguishes requests that begin alike."""
        return cls(PromptKeys.of(body), session, blake2b(body + truncated.encode(), digest_size=8).hexdigest())


class Sent(NamedTuple):
    """News for other routers: a prompt was sent. `end` is its own key, `before` that of the turn it continues."""

    beginning: bytes
    end: bytes
    before: bytes
    replica: str


@dataclass
class _Replica:
    """The requests that routers have sent to a replica since its last report, and whether it answers.

    A turn of a conversation means that the turn before it has ended: `turns` counts a turn where it is sent, and takes
    one off where the turn before was. `new` counts other requests: as many of them are taken to have ended as came
    before the report, `usual`.
    """

    received: int = 0
    new: int = 0
    usual: int = 0
    turns: int = 0
    watch: asyncio.Task[None] | None = None
    silent_since: float | None = None

    def requests(self, load: Load) -> int:
        """Requests that wait and run now."""
        if load.received != self.received:
            self.received, self.usual, self.new, self.turns = load.received, self.new, 0, 0
        return max(0, load.requests + max(0, self.new - self.usual) + self.turns)

    def forget(self) -> None:
        if self.watch is not None:
            self.watch.cancel()
        self.watch = self.silent_since = None


class Fleet:
    """Sends a session to its replica, and a prompt to one that had its beginning, while that is not out of balance.

    Others go to the least loaded one. A replica that has not answered a health check for `silent_seconds` gets nothing
    while others answer or have answered later; it is checked every `pause_seconds`. `slack` is that of `Affinity` until
    a replica has reported its places: then a quarter of these. Below that, what affinity saves is more than others lose
    by it.
    """

    def __init__(
        self,
        slack: int = 1,
        on_death: Callable[[set[str], str], object] = lambda digests, replica: None,
        on_sent: Callable[[Sent], object] = lambda sent: None,
        *,
        silent_seconds: float = 3.0,
        pause_seconds: float = 1.0,
    ) -> None:
        """Callbacks get news for other routers: `on_death` the digests of what a replica was sent before its process
        ended, `on_sent` where each prompt went."""
        self._on_death = on_death
        self._on_sent = on_sent
        self._silent_seconds = silent_seconds
        self._pause_seconds = pause_seconds
        self._affinity = Affinity(slack)
        self._suspects = Suspects()
        self._replicas: dict[str, _Replica] = {}
        self._turns: OrderedDict[bytes, str] = OrderedDict()
        """The replica of the last turn of each conversation, by the key of its whole prompt."""

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
        if places := max((load.places for load in loads.values()), default=0):
            self._affinity.slack = max(1, places // _SLACK)
        beginnings, ends = question.prompt
        before = next((end for end in reversed(ends[:-1]) if end in self._turns), b"")
        if not question.replica:
            question.refused_for = self._suspects.refused_for(question.digest)
            counts = {name: self._replica(name).requests(load) for name, load in loads.items()}
            if (earlier := self._turns.get(before)) in counts:
                counts[earlier] -= 1
            question.replica = self._chosen(question, earlier, self._answering(counts))
        if question.refused_for:
            return
        self._suspects.sent(question.digest, question.replica)
        self._affinity.learn(beginnings[:-1], question.replica)
        beginning, end = (keys[-1] if keys else b"" for keys in (beginnings, ends))
        sent = Sent(beginning, end, before, question.replica)
        self.note(sent)
        self._on_sent(sent)

    def note(self, sent: Sent) -> None:
        """This router or another one has sent a request to a replica."""
        replica = self._replica(sent.replica)
        # Once: of several prompts that go on from the same one, the others are no turns.
        earlier = self._replicas.get(self._turns.pop(sent.before, ""))
        if earlier is None:
            replica.new += 1
        else:
            earlier.turns -= 1
            replica.turns += 1
        if sent.beginning:
            self._affinity.learn([sent.beginning], sent.replica)
        if sent.end:
            self._turns[sent.end] = sent.replica
        if len(self._turns) > _MOST_TURNS:
            self._turns.popitem(last=False)

    def accuse(self, digests: Iterable[str], replica: str) -> None:
        """Another router has found that a replica died, and had sent these requests there."""
        self._suspects.accuse(digests, replica)

    def _died(self, name: str) -> None:
        if digests := self._suspects.died(name):
            self._on_death(digests, name)

    def _replica(self, name: str) -> _Replica:
        return self._replicas.setdefault(name, _Replica())

    def _answering(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        """The replicas that answer, or else those that did last: a busy one is slow, and a stopped one is silent."""
        since = {name: self._replica(name).silent_since or inf for name in counts}
        last = max(since.values(), default=inf)
        return {name: count for name, count in counts.items() if since[name] >= last - self._silent_seconds}

    def _chosen(self, question: Question, earlier: str | None, counts: Mapping[str, int]) -> str:
        if question.session:
            return ranked(question.session.encode(), counts)[0]
        chosen = self._affinity.choose(question.prompt.beginnings, counts, earlier)
        return chosen or min(counts, key=counts.__getitem__)

    async def _watch(self, name: str, replica: _Replica, host: str, port: int) -> None:
        """Follow whether a replica answers, and notice at once when its process ends.

        A replica that has never answered is not judged: it may be unreachable from here.
        """
        has_answered = False

        def answered() -> None:
            nonlocal has_answered
            has_answered = True
            replica.silent_since = None

        def is_silent() -> None:
            if has_answered and replica.silent_since is None:
                replica.silent_since = asyncio.get_running_loop().time()

        before = _End.NONE
        while True:
            try:
                end = await self._follow(host, port, answered)
            except (OSError, asyncio.TimeoutError) as error:
                is_silent()
                if has_answered and isinstance(error, ConnectionRefusedError):
                    self._died(name)
                await asyncio.sleep(self._pause_seconds)
                continue
            if before is end is _End.UNANSWERED:
                is_silent()
            # After one early end, the next connection says at once whether the process has ended.
            if _End.NONE not in (before, end):
                await asyncio.sleep(self._pause_seconds)
            before = end

    async def _follow(self, host: str, port: int, answered: Callable[[], None]) -> "_End":
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
    """The end of a connection to a replica: none within the pause, after its answer, or without one."""

    NONE = 0
    ANSWERED = 1
    UNANSWERED = 2


# -- requests that end replicas, known by what each replica had been sent a short time before it died ------------------
#
# A request that ends the engine alone is found by the replica itself (`batching.blame`). This is for what ends the
# whole server process, such as a body on which a library of native code fails. It is given to two replicas at most.

RECENT_SECONDS = 10.0
"""Seconds before a replica's death in which a request that was sent to it becomes a suspect."""
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
        """Note that a request went to a replica."""
        self._sent.setdefault(replica, deque(maxlen=_MOST_SENT)).append((self._clock(), digest))

    def died(self, replica: str) -> set[str]:
        """Accuse what a replica got shortly before its process ended unexpectedly; return the digests."""
        since = self._clock() - RECENT_SECONDS
        accused = {digest for at, digest in self._sent.pop(replica, ()) if at >= since}
        self.accuse(accused, replica)
        return accused

    def accuse(self, digests: Iterable[str], replica: str) -> None:
        """Note that these requests were in a replica that died, as this router or another one knows."""
        now = self._clock()
        for digest in digests:
            before = frozenset() if self._is_over(digest, now) else self._deaths[digest][1]
            self._deaths[digest] = (now, before | {replica})
            self._deaths.move_to_end(digest)
        while len(self._deaths) > _MOST_SUSPECTS:
            self._deaths.popitem(last=False)

    def keep(self, replicas: Collection[str]) -> None:
        """Forget the replicas that are not among these."""
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
