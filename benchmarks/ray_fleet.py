"""Measure four replicas on Ray under its HAProxy and our router (docs/ray.md): cost, affinity, and faults.

    python -m benchmarks.ray_fleet [--streams 16] [--tokens 500] [--rounds 3]

Replicas are of the scripted engine, on a cluster of this machine. Rows come as they are measured:

- CPU per token: of all processes of the cluster but the engines, less what the idle cluster takes, beside the server
  without Ray. Both get their load in turn; the ratio is the median of the rounds.
- turns: conversations at the same time; the share of turns whose replica had the turn before.
- replica stopped (SIGSTOP): a request every quarter of a second; the slowest of those from 10 s on.
- request that ends servers: sent again by its client until it is refused; how many replicas it has ended.
- HAProxy, the router: killed under a request every quarter of a second; how many fail, and for how long.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
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


class Row(NamedTuple):
    """A measurement and its figure: a row of docs/ray.md."""

    what: str
    figure: str


def body(prompt: str, tokens: int = 3) -> dict[str, object]:
    """A request for this number of tokens."""
    return {"inputs": prompt, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}}


# -- cost --------------------------------------------------------------------------------------------------------------


def cluster_cpu(cluster: RayCluster) -> float:
    """CPU seconds so far of all processes of the cluster but the engines."""
    total = 0.0
    for process in cluster.descendants():
        if "djl_trtllm.executor" not in command(process):
            try:
                total += cpu_seconds(process)
            except psutil.Error:
                continue
    return total


def cost(cluster: RayCluster, server: Server, streams: int, tokens: int, rounds: int) -> Iterator[Row]:
    """CPU microseconds for a token, on the cluster and of the server alone."""
    of_server: list[float] = []
    of_cluster: list[float] = []
    with_idle: list[float] = []
    for _ in range(rounds):
        before = cpu_seconds(server.process)
        round_of(server.port, streams, tokens)
        of_server.append((cpu_seconds(server.process) - before) / (streams * tokens))
        before, began = cluster_cpu(cluster), time.monotonic()
        time.sleep(5)
        idle = (cluster_cpu(cluster) - before) / (time.monotonic() - began)
        before, began = cluster_cpu(cluster), time.monotonic()
        round_of(cluster.port, streams * REPLICAS, tokens)
        spent, lasted = cluster_cpu(cluster) - before, time.monotonic() - began
        with_idle.append(spent / (streams * REPLICAS * tokens))
        of_cluster.append((spent - idle * lasted) / (streams * REPLICAS * tokens))
    ratios = [ray / alone for ray, alone in zip(of_cluster, of_server, strict=True)]
    alone, ray, whole = (statistics.median(each) * 1e6 for each in (of_server, of_cluster, with_idle))
    yield Row("CPU for a token, server without Ray", f"{alone:.0f} us")
    yield Row("CPU for a token, 4 replicas, HAProxy, router, Ray", f"{ray:.0f} us, with the idle cluster's {whole:.0f}")
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
        async with client_of(cluster) as client:
            return await asyncio.gather(*[conversation(client, number) for number in range(_CONVERSATIONS)])

    found = asyncio.run(all_of_them())
    same = [now == before for replicas in found for before, now in pairwise(replicas)]
    counts = sorted(sum(replicas.count(name) for replicas in found) for name in {n for each in found for n in each})
    yield Row(
        f"turns of {tokens} tokens at the replica of the turn before ({len(same)})", f"{sum(same) / len(same):.2f}"
    )
    yield Row(f"turns of {tokens} tokens at each replica", ", ".join(map(str, counts)))


def client_of(cluster: RayCluster) -> httpx.AsyncClient:
    """A client of the cluster's address."""
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
    """A request every quarter of a second; `at` is counted from the strike, two seconds after the first."""

    async def one(client: httpx.AsyncClient, began: float, number: int) -> Request:
        at = time.monotonic()
        try:
            answer = await client.post("/invocations", json=body(f"steady {number} {_WORDS}"))
            status = answer.status_code
        except httpx.HTTPError:
            status = 0
        return Request(at - began, time.monotonic() - at, status)

    async def all_of_them() -> list[Request]:
        async with client_of(cluster) as client:
            began = time.monotonic() + 2
            sent: list[Awaitable[Request]] = []
            struck = False
            while time.monotonic() < began + seconds:
                if time.monotonic() >= began and not struck:
                    struck = True
                    strike()
                sent.append(asyncio.ensure_future(one(client, began, len(sent))))
                await asyncio.sleep(_EVERY)
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
    with httpx.Client(base_url=f"http://127.0.0.1:{cluster.port}", timeout=_PATIENCE) as client:
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

    requests = steady(cluster, seconds, strike)
    failed = [each for each in requests if each.status != 200]
    last = max((each.at for each in failed), default=0.0)
    yield Row(f"{what} killed: failed", f"{len(failed)} of {len(requests)}, the last {last:.0f} s after it")


def rows(folder: Path, streams: int, tokens: int, rounds: int) -> Iterator[Row]:
    """All of them."""
    script = {"steps_per_second": 50, "faults": [{"action": "end", "max_new_tokens": _POISON}]}
    model = scripted_model(folder / "model", script, **{"option.max_rolling_batch_size": max(32, streams)})
    with serving(model) as server, RayCluster(cpus=8) as cluster:
        cluster.deploy(model, replicas=REPLICAS, direct=True)
        cluster.wait_for_replicas(REPLICAS)
        yield from cost(cluster, server, streams, tokens, rounds)
        yield from turns(cluster, 20)
        yield from turns(cluster, 100)
        yield from poison(cluster)
        yield from stopped(cluster)
        yield from killed(cluster, "one router", "djl-trtllm-router", 1, 20)
        yield from killed(cluster, "all routers", "djl-trtllm-router", 9, 20)
        yield from killed(cluster, "HAProxy", "haproxy -", 9, 90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16, help="of a replica")
    parser.add_argument("--tokens", type=int, default=500, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(Path(folder), arguments.streams, arguments.tokens, arguments.rounds):
            Console().print(f"| {row.what} | {row.figure} |", soft_wrap=True)


if __name__ == "__main__":
    main()
