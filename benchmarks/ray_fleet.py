"""Measure four replicas on Ray under its HAProxy and our router (docs/ray.md): cost, affinity, and faults.

    python -m benchmarks.ray_fleet [--streams 16] [--tokens 500] [--rounds 3]

Replicas are of the scripted engine, on a cluster of this machine. Rows come as they are measured:

- CPU per token: of all processes of the cluster but the engines, less what the idle cluster takes, beside the server
  without Ray. Both get their load in turn; the ratio is the median of the rounds.
- turns: conversations at the same time; the share of turns whose replica had the turn before.
- replica stopped (SIGSTOP): a request every quarter of a second; the slowest of those from 10 s on.
- request that ends servers: sent again by its client until it is refused; how many replicas it has ended.
- a fleet's life, under a request every quarter of a second: an update, a second application, a replica, the router,
  HAProxy, a node and the head killed; how many requests fail, and until when.
- autoscaling: 24 streams at the same time to one replica that may become three.
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
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
from rich.console import Console

from benchmarks.ray_serve import round_of
from benchmarks.servers import Server, cpu_seconds, serving
from tests.support.models import scripted_model
from tests.support.ray_cluster import RayCluster, command

REPLICAS = 4
_CONVERSATIONS, _TURNS = 24, 6
_WORDS = "the little girl went into the forest and there she met a wolf who asked her where she was going " * 3
_EVERY = 0.25
_POISON = 77
"""`max_new_tokens` of the request that ends the server."""
_PATIENCE = 120.0
_SCALED_SECONDS = 110.0


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


def cost(cluster: RayCluster, server: Server, streams: int, tokens: int, rounds: int) -> Iterator[Row]:
    """CPU microseconds for a token, on the cluster and of the server alone."""
    of_server: list[float] = []
    of_cluster: list[dict[str, float]] = []
    with_idle: list[float] = []
    for _ in range(rounds):
        alone_before = cpu_seconds(server.process)
        round_of(server.port, streams, tokens)
        of_server.append((cpu_seconds(server.process) - alone_before) / (streams * tokens))
        before, began = cluster_cpu(cluster), time.monotonic()
        time.sleep(5)
        idle, lasted = cluster_cpu(cluster), time.monotonic() - began
        rates = {kind: (idle[kind] - before[kind]) / lasted for kind in idle}
        before, began = cluster_cpu(cluster), time.monotonic()
        round_of(cluster.port, streams * REPLICAS, tokens)
        after, lasted = cluster_cpu(cluster), time.monotonic() - began
        count = streams * REPLICAS * tokens
        with_idle.append((sum(after.values()) - sum(before.values())) / count)
        of_cluster.append({kind: (after[kind] - before[kind] - rates[kind] * lasted) / count for kind in after})
    totals = [sum(each.values()) for each in of_cluster]
    ratios = [ray / alone for ray, alone in zip(totals, of_server, strict=True)]
    alone, ray, whole = (statistics.median(each) * 1e6 for each in (of_server, totals, with_idle))
    yield Row("CPU for a token, server without Ray", f"{alone:.0f} us")
    yield Row("CPU for a token, 4 replicas, HAProxy, router, Ray", f"{ray:.0f} us, with the idle cluster's {whole:.0f}")
    parts = {kind: statistics.median(each[kind] for each in of_cluster) * 1e6 for kind in of_cluster[0]}
    yield Row("of which", ", ".join(f"{kind} {part:.1f}" for kind, part in sorted(parts.items())))
    yield Row(
        "the ratio of both, and of the rounds",
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
    )


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
    """One of the steady load: when it was sent, the seconds until its end, and the status; 0 without an answer."""

    at: float
    seconds: float
    status: int


def steady(cluster: RayCluster, seconds: float, strike: Callable[[], object]) -> list[Request]:
    """A request every quarter of a second, until the strike has returned and at least for this number of seconds.

    `at` is counted from the strike, two seconds after the first request.
    """

    async def one(client: httpx.AsyncClient, began: float, number: int) -> Request:
        at = time.monotonic()
        try:
            answer = await client.post("/invocations", json=body(f"steady {number} {_WORDS}"))
            status = answer.status_code
        except httpx.HTTPError:
            status = 0
        return Request(at - began, time.monotonic() - at, status)

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
            await struck
            return await asyncio.gather(*sent)

    return asyncio.run(all_of_them())


def stopped(cluster: RayCluster) -> Iterator[Row]:
    """A replica is stopped, and Ray replaces it."""
    replica = cluster.replicas()[0]
    requests = steady(cluster, 40, replica.suspend)
    late = max((each.seconds for each in requests if each.at >= 10), default=0.0)
    early = [each for each in requests if 0 <= each.at < 10 and each.seconds > 1]
    failed = sum(each.status != 200 for each in requests)
    yield Row("replica stopped: slowest request from 10 s on", f"{late:.1f} s")
    slow = f"{len(early)}, the slowest {max((each.seconds for each in early), default=0.0):.0f} s"
    yield Row("replica stopped: requests of the first 10 s that took more than 1 s", slow)
    yield Row("replica stopped: failed", f"{failed} of {len(requests)}")
    if replica.is_running():
        replica.kill()
    cluster.wait_for_replicas(REPLICAS)


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
    cluster.wait_for_replicas(REPLICAS)


def killed(cluster: RayCluster, what: str, mark: str, most: int, seconds: float) -> Iterator[Row]:
    """The processes with this in their command line are killed, and no more than `most`."""

    def strike() -> None:
        for process in [process for process in cluster.descendants() if mark in command(process)][:most]:
            process.kill()

    yield struck(cluster, f"{what} killed", strike, seconds)


def struck(cluster: RayCluster, what: str, strike: Callable[[], object], seconds: float) -> Row:
    """How many requests fail, and how long the strike takes."""
    took = 0.0

    def timed() -> None:
        nonlocal took
        began = time.monotonic()
        strike()
        took = time.monotonic() - began

    requests = steady(cluster, seconds, timed)
    failed = [each for each in requests if each.status != 200]
    last = f", the last {max(each.at for each in failed):.0f} s after it" if failed else ""
    return Row(f"{what}: failed; seconds that it took", f"{len(failed)} of {len(requests)}{last}; {took:.0f}")


def life(cluster: RayCluster, model: Path) -> Iterator[Row]:
    """What happens to a fleet, from the harmless to the end of its head."""

    def update() -> None:
        cluster.deploy(model, replicas=REPLICAS, direct=True, options={"job_queue_size": 999})
        cluster.wait_for_replicas(REPLICAS)

    def second() -> None:
        cluster.deploy(model, app="second", route="/second", replicas=2, direct=True)

    def replica() -> None:
        cluster.replicas()[0].kill()
        time.sleep(1)
        cluster.wait_for_replicas(REPLICAS)

    def node() -> None:
        cluster.call("add_node")
        cluster.call("lose_node", cluster.replicas()[0].pid)
        time.sleep(1)
        cluster.wait_for_replicas(REPLICAS)

    yield struck(cluster, "rolling update", update, 10)
    yield struck(cluster, "second application", second, 10)
    with client_of(cluster) as client:
        answers = [client.post("/second/invocations", json=body(f"{n} {_WORDS}")) for n in range(12)]
    replicas = {answer.headers.get("x-replica") for answer in answers}
    yield Row(
        "its statuses, and replicas that answered", f"{ {answer.status_code for answer in answers} }, {len(replicas)}"
    )
    cluster.call("delete", "second")
    yield struck(cluster, "replica killed", replica, 10)
    yield from killed(cluster, "one router", "djl-trtllm-router", 1, 20)
    yield from killed(cluster, "all routers", "djl-trtllm-router", 9, 20)
    yield from killed(cluster, "HAProxy", "haproxy -", 9, 90)
    yield from scaled(cluster, model)
    yield struck(cluster, "node lost", node, 10)
    yield struck(cluster, "head lost", lambda: cluster.call("kill_gcs"), 10)


def scaled(cluster: RayCluster, model: Path) -> Iterator[Row]:
    """A replica that may become three, under 24 streams of two seconds, one after the other."""
    cluster.deploy(model, app="scaled", route="/scaled", autoscale="1:3:8", direct=True)
    seen: dict[int, float] = {}
    statuses: Counter[int] = Counter()

    async def stream(client: httpx.AsyncClient, number: int, until: float) -> None:
        while time.monotonic() < until:
            answer = await client.post("/scaled/invocations", json=body(f"{number} {_WORDS}", 100))
            statuses[answer.status_code] += 1

    async def watch(began: float, until: float) -> None:
        while time.monotonic() < until:
            running = (await asyncio.to_thread(cluster.states, "scaled")).get("RUNNING", 0)
            seen.setdefault(running, time.monotonic() - began)
            await asyncio.sleep(1)

    async def all_of_them() -> None:
        began, until = time.monotonic(), time.monotonic() + _SCALED_SECONDS
        async with async_client_of(cluster) as client:
            await asyncio.gather(watch(began, until), *(stream(client, number, until) for number in range(24)))

    asyncio.run(all_of_them())
    cluster.call("delete", "scaled")
    yield Row(
        "autoscaling from 1 to 3: statuses", ", ".join(f"{count} x {status}" for status, count in statuses.items())
    )
    yield Row("replicas, and when they ran", ", ".join(f"{count} at {at:.0f} s" for count, at in sorted(seen.items())))


def rows(folder: Path, streams: int, tokens: int, rounds: int) -> Iterator[Row]:
    """All of them."""
    script = {"steps_per_second": 50, "faults": [{"action": "end", "max_new_tokens": _POISON}]}
    model = scripted_model(folder / "model", script, **{"option.max_rolling_batch_size": max(32, streams)})
    with serving(model) as server, RayCluster(nodes=2, cpus=8) as cluster:
        cluster.deploy(model, replicas=REPLICAS, direct=True)
        cluster.wait_for_replicas(REPLICAS)
        yield from cost(cluster, server, streams, tokens, rounds)
        yield from turns(cluster, 20)
        yield from turns(cluster, 100)
        yield from poison(cluster)
        yield from stopped(cluster)
        yield from life(cluster, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="of a replica")
    parser.add_argument("--tokens", type=int, default=500, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    print(f"load of the machine: {os.getloadavg()[0]:.0f}")
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), arguments.streams, arguments.tokens, arguments.rounds):
            Console().print(f"| {row.what} | {row.figure} |", soft_wrap=True)
    print(f"load of the machine: {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
