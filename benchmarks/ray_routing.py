"""What a gateway on Ray costs and finds: requests routed by the beginning of their prompt (docs/ray.md).

    python -m benchmarks.ray_routing [--streams 16] [--steps 50] [--tokens 250] [--rounds 5]
                                     [--replicas 4] [--conversations 32] [--turns 6]

The first table compares two ways to one replica of a scripted engine of known rate, each in every round, one after the
other: `direct` (HAProxy and the replica) and `gateway` (HAProxy, the gateway, the replica). CPU time is that of all
their processes but the engine's, for a token; figures are medians over the rounds.

The second table has conversations whose turns send all that was said before. `again` is the share of turns, but for
first ones, that reached the replica of the turn before, and so could reuse its KV cache; `most` is the share of turns
of the busiest replica. `load` is a gateway that reads no prompts: power of two choices.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from itertools import pairwise
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.load import post, run_streams
from benchmarks.ray_serve import Figures
from tests.support.models import PROMPT, scripted_model
from tests.support.ray_cluster import RayCluster, command

WAYS = ("direct", "gateway")


def cpu_seconds(cluster: RayCluster, way: str) -> float:
    """Of the processes between the client and the engine."""
    used = 0.0
    for process in cluster.descendants():
        line = command(process) + " "
        if "haproxy" in line.split(" ")[0].rpartition("/")[2] or f"ServeReplica:{way}:" in line:
            times = process.cpu_times()  # without its children: the engine is one
            used += times.user + times.system
    return used


def costs(model: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, float, Figures]]:
    """CPU microseconds for a token, and what clients see, of each way."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": arguments.tokens, "ignore_eos": True}, "stream": True}
    rounds: dict[str, list[tuple[float, ...]]] = {way: [] for way in WAYS}
    with RayCluster(cpus=2) as cluster:
        cluster.deploy(model, app="direct", route="/direct")
        cluster.deploy(model, app="gateway", route="/gateway", routing="prefix")
        for number in range(arguments.rounds + 1):
            for way in WAYS:
                before = cpu_seconds(cluster, way)
                streams = run_streams(cluster.port, [post(f"/{way}/invocations", body)] * arguments.streams)
                used = (cpu_seconds(cluster, way) - before) / sum(stream.tokens for stream in streams)
                if number:  # the first is to warm up
                    rounds[way].append((used * 1e6, *astuple(Figures.of(streams))))
    for way, figures in rounds.items():
        used, *others = (statistics.median(values) for values in zip(*figures, strict=True))
        yield way, used, Figures(*others)


def shares(model: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, float, float]]:
    """Of the turns of conversations: those at the replica of the turn before, and those at the busiest replica."""
    with RayCluster(cpus=2) as cluster:
        for routing in ("load", "prefix"):
            cluster.deploy(model, replicas=arguments.replicas, routing=routing, cpus=0.2)
            cluster.wait_for_replicas(arguments.replicas + 1)
            with ThreadPoolExecutor(arguments.conversations) as pool, httpx.Client(base_url=cluster.url) as client:
                numbers = range(arguments.conversations)
                talks = list(pool.map(lambda number: talk(client, number, arguments.turns), numbers))
            again = [earlier == later for replicas in talks for earlier, later in pairwise(replicas)]
            of_replicas = Counter(replica for replicas in talks for replica in replicas)
            yield routing, statistics.fmean(again), max(of_replicas.values()) / of_replicas.total()


def talk(client: httpx.Client, number: int, turns: int) -> list[str]:
    """The replicas of a conversation's turns. All conversations have the same instructions."""
    chance = random.Random(number)
    said = [{"role": "system", "content": "You are a helpful assistant. " * 20}]
    replicas = []
    for _ in range(turns):
        said.append(
            {
                "role": "user",
                "content": " ".join(f"word{chance.randrange(100)}" for _ in range(chance.randrange(5, 40))),
            }
        )
        body = {"inputs": " ".join(message["content"] for message in said), "parameters": {"max_new_tokens": 50}}
        answer = client.post("/invocations", json=body, timeout=120).raise_for_status()
        said.append({"role": "assistant", "content": answer.json()["generated_text"]})
        replicas.append(answer.headers["x-replica"])
    return replicas


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--steps", type=float, default=50, help="tokens per second of a stream")
    parser.add_argument("--tokens", type=int, default=250, help="of a stream")
    parser.add_argument("--rounds", type=int, default=5, help="of the first table; 0 for none")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = scripted_model(Path(folder) / "model", {"steps_per_second": arguments.steps})
        if arguments.rounds:
            cost = Table("way", "CPU µs/token", "tok/s", "TTFT ms", "p99", "ITL ms", "p99")
            for way, used, got in costs(model, arguments):
                latencies = (f"{value:.1f}" for value in (got.ttft, got.ttft_p99, got.itl, got.itl_p99))
                cost.add_row(way, f"{used:.0f}", f"{got.rate:.0f}", *latencies)
            Console().print(cost)
        found = Table("routing", "again", "most")
        for routing, share, most in shares(model, arguments):
            found.add_row(routing, f"{share:.2f}", f"{most:.2f}")
        Console().print(found)


if __name__ == "__main__":
    main()
