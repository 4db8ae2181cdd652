"""The simulation: events in order of time, a choice of replicas, replicas that start, drain, die and end."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from benchmarks.fleet.arrivals import Request
from benchmarks.fleet.replica import Replica, Speed
from benchmarks.fleet.rules import Figures, Rule

SCRAPE_SECONDS = 15
"""The PodMonitor's interval, KEDA's polling interval, and the HPA's: a decision is as late as two of them."""


@dataclass(frozen=True)
class ColdStart:
    """Seconds until a new replica is ready. `compiling` is 0 where another one's engine is in a fleet's cache."""

    machine: float
    download: float
    compiling: float
    loading: float

    @property
    def seconds(self) -> float:
        return self.machine + self.download + self.compiling + self.loading


@dataclass(frozen=True)
class Fleet:
    """What a replica is, and how it begins and ends.

    `places` of the `batch` have room in the KV cache. `drain`: how long requests go on in a replica that is taken away.
    """

    speed: Speed
    batch: int
    places: int
    queue: int
    cold_start: ColdStart
    drain: float


@dataclass(frozen=True)
class Troubles:
    """What goes wrong, and what clients do then.

    A client whose request was refused or cut sends it again, until it has done so `attempts` times: after `pause`
    seconds, then twice as long, and so on. At each time of `deaths` the oldest replica dies, and another one starts.
    """

    attempts: int = 1
    pause: float = 1.0
    deaths: tuple[float, ...] = ()
    at_random: bool = False
    """Whether any replica gets a request, as where no router knows their loads, instead of the least loaded one."""


@dataclass
class Result:
    """What became of the requests, and integrals over the time from `begin` to `end`.

    `attempts` are numbers by the outcome: those of requests that were sent again are in it too.
    """

    begin: float
    end: float
    requests: list[Request] = field(default_factory=list)
    attempts: Counter[str] = field(default_factory=Counter)
    replica_seconds: float = 0.0
    most_replicas: int = 0
    request_seconds: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the requests that ended in that time."""
        ended = (each for each in self.of("complete") if each.ended is not None and self.begin <= each.ended < self.end)
        return sum(request.output_tokens for request in ended) / self.seconds

    def of(self, outcome: str) -> list[Request]:
        return [request for request in self.requests if request.outcome == outcome]

    def first_tokens(self) -> list[float]:
        """Times to the first token, in order of size."""
        found = (request.first_token - request.arrived for request in self.of("complete") if request.first_token)
        return sorted(found)


class Simulation:
    """`run` simulates all requests to their end, once. The integrals of the result are from `begin` to `end`."""

    def __init__(
        self,
        fleet: Fleet,
        rule: Rule,
        begin: float = 0.0,
        end: float = math.inf,
        troubles: Troubles = Troubles(),
    ) -> None:
        self._fleet, self._rule, self._troubles = fleet, rule, troubles
        self._chance = random.Random(1)
        self._again = 0
        """Requests whose clients are to send them again."""
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._replicas: list[Replica] = []
        self._ready: list[Replica] = []
        """Those of them that take requests, the oldest first."""
        self._loads: list[tuple[int, int, Replica]] = []
        self._starting = 0
        self._in_system = 0
        self._now = 0.0
        self._scraped: list[Figures] = []
        self._arrivals_left = True
        self.result = Result(begin, end)

    def run(self, requests: Iterable[Request]) -> Result:
        """Simulate all requests on a fleet that begins with its least number of replicas."""
        for _ in range(self._rule.least):
            self._become_ready(self._new(), 0.0)
        self._arrive(iter(requests))
        self._at(SCRAPE_SECONDS, self._decide)
        for time in self._troubles.deaths:
            self._at(time, self._die)
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            self._pass(now)
            happen(now)
        return self.result

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _pass(self, now: float) -> None:
        result = self.result
        alive = len(self._replicas) + self._starting
        passed = max(0.0, min(now, result.end) - max(self._now, result.begin))
        result.seconds += passed
        result.replica_seconds += passed * alive
        result.request_seconds += passed * self._in_system
        result.most_replicas = max(result.most_replicas, alive)
        self._now = now

    # -- requests ------------------------------------------------------------------------------------------------------

    def _arrive(self, requests: Iterable[Request]) -> None:
        left = iter(requests)

        def next_one() -> None:
            request = next(left, None)
            if request is None:
                self._arrivals_left = False
            else:
                self._at(request.arrived, lambda now: taken(request, now))

        def taken(request: Request, now: float) -> None:
            self.result.requests.append(request)
            self._send(request, now)
            next_one()

        next_one()

    def _send(self, request: Request, now: float) -> None:
        request.attempts += 1
        replica = self._any() if self._troubles.at_random else self._least_loaded()
        if replica is not None and replica.add(request, now):
            self._in_system += 1
            self._changed(replica, now)
        else:
            request.outcome, request.ended = "refused", now
            self._failed(request, now)

    def _failed(self, request: Request, now: float) -> None:
        """A request was refused or cut; its client sends it again, or gives up."""
        self.result.attempts[request.outcome] += 1
        if request.attempts >= self._troubles.attempts:
            return
        request.outcome = ""
        request.started = request.first_token = request.ended = None
        self._again += 1

        def again(at: float) -> None:
            self._again -= 1
            self._send(request, at)

        self._at(now + self._troubles.pause * 2 ** (request.attempts - 1), again)

    def _any(self) -> Replica | None:
        return self._chance.choice(self._ready) if self._ready else None

    def _least_loaded(self) -> Replica | None:
        """The ready replica with the least to do. Entries of the heap that are no longer true are thrown away."""
        while self._loads:
            load, _, replica = self._loads[0]
            if replica.ready and not replica.draining and replica.load == load:
                return replica
            heapq.heappop(self._loads)
        return None

    def _changed(self, replica: Replica, now: float) -> None:
        if not replica.draining:
            heapq.heappush(self._loads, (replica.load, next(self._order), replica))
        ends, changes = replica.next_end(now), replica.changes
        if ends is not None:
            self._at(ends, lambda at: self._end_due(replica, changes, at))

    def _end_due(self, replica: Replica, changes: int, now: float) -> None:
        if replica.changes != changes:
            return
        ended = len(replica.end_due(now))
        self._in_system -= ended
        self.result.attempts["complete"] += ended
        self._changed(replica, now)
        if replica.draining and not replica.load:
            self._replicas.remove(replica)

    # -- replicas ------------------------------------------------------------------------------------------------------

    def _new(self) -> Replica:
        return Replica(self._fleet.speed, self._fleet.places, self._fleet.queue)

    def _become_ready(self, replica: Replica, now: float) -> None:
        replica.ready = True
        self._replicas.append(replica)
        self._ready.append(replica)
        self._changed(replica, now)

    def _die(self, now: float) -> None:
        if self._ready:
            replica = self._ready.pop(0)
            replica.ready = False
            self._end(replica, now)
            self._start(now)

    def _end(self, replica: Replica, now: float) -> None:
        """A replica is gone, and what it still had is cut."""
        self._replicas.remove(replica)
        left = replica.cut(now)
        self._in_system -= len(left)
        for request in left:
            self._failed(request, now)

    def _decide(self, now: float) -> None:
        """The rule sees the figures of the last scrape."""
        serving = list(self._ready)
        scraped, self._scraped = self._scraped, [self._figures(each) for each in serving]
        there = len(serving) + self._starting
        wanted = self._rule.wanted(now, there, scraped) if scraped else there
        for _ in range(wanted - there):
            self._start(now)
        for replica in serving[max(1, len(serving) - max(0, there - wanted)) :]:
            self._drain(replica, now)
        if self._arrivals_left or self._in_system or self._again:
            self._at(now + SCRAPE_SECONDS, self._decide)

    def _figures(self, replica: Replica) -> Figures:
        places, batch = self._fleet.places, self._fleet.batch
        full = places < batch and len(replica.running) == places
        return Figures(len(replica.waiting), len(replica.running), batch, full)

    def _start(self, now: float) -> None:
        self._starting += 1

        def ready(at: float) -> None:
            self._starting -= 1
            self._become_ready(self._new(), at)

        self._at(now + self._fleet.cold_start.seconds, ready)

    def _drain(self, replica: Replica, now: float) -> None:
        replica.draining = True
        self._ready.remove(replica)
        if not replica.load:
            self._replicas.remove(replica)
            return

        def over(at: float) -> None:
            if replica in self._replicas:
                self._end(replica, at)

        self._at(now + self._fleet.drain, over)
