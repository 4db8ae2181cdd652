"""What Ray Serve costs: replicas of a scripted engine of known rate, on a cluster of this machine (docs/ray.md).

    python -m benchmarks.ray_serve [--replicas 1 2 4] [--streams 16] [--steps 50] [--tokens 250] [--rounds 3]
    python -m benchmarks.ray_serve --saturated [--streams 64] [--tokens 250] [--rounds 5]

Every stream gets `--steps` tokens per second, and a replica has place for `--streams`: what a replica offers is their
product. `share` is the throughput over that of all replicas. The first rows compare ways to one replica: `direct` is
the server without Ray, `ray` is HAProxy in front of replicas, `ray, python proxy` is Ray's own proxy. TTFT and ITL are
medians and the 99th percentiles of the clients; the ITL of an engine that nothing delays is 1 / `--steps`. Each figure
is the median over the rounds. Cluster, replicas, engines and clients share the machine's cores.

With `--saturated` the engine is as fast as its streams are read. The ways to one replica are measured in turn, round
after round, so that what else the machine does meets all of them; `ratio` is that of the throughput to Ray's own proxy
in the same round: the median, and the least and the greatest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.load import Burst, percentile, post, run_streams
from benchmarks.servers import serving
from tests.support.models import PROMPT, scripted_model
from tests.support.ray_cluster import RayCluster

_PROXY = "ray, python proxy"


class Figures(NamedTuple):
    """The figures of one round: tokens per second, milliseconds."""

    rate: float
    ttft: float
    ttft_p99: float
    itl: float
    itl_p99: float


def round_of(port: int, streams: int, tokens: int) -> Figures:
    """Run all streams at once."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, "ignore_eos": True}, "stream": True}
    found = Burst.of(run_streams(port, [post("/invocations", body)] * streams))
    times = (1e3 * percentile(values, share) for values in (found.first, found.between) for share in (0.5, 0.99))
    return Figures(found.rate, *times)


def measured(port: int, replicas: int, arguments: argparse.Namespace) -> Figures:
    """The median of each figure over the rounds, after a short one."""
    streams = arguments.streams * replicas
    round_of(port, streams, 5)
    rounds = [round_of(port, streams, arguments.tokens) for _ in range(arguments.rounds)]
    return Figures(*(statistics.median(values) for values in zip(*rounds, strict=True)))


@contextmanager
def on_ray(model: Path, most: int, *, direct: bool) -> Iterator[RayCluster]:
    """A cluster with room for this number of replicas."""
    with RayCluster(cpus=most, direct=direct) as cluster:
        cluster.deploy(model)
        yield cluster


def rows(model: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, int, Figures]]:
    with serving(model) as server:
        yield "direct", 1, measured(server.port, 1, arguments)
    with on_ray(model, 1, direct=False) as cluster:
        yield _PROXY, 1, measured(cluster.port, 1, arguments)
    with on_ray(model, max(arguments.replicas), direct=True) as cluster:
        for replicas in arguments.replicas:
            cluster.deploy(model, replicas=replicas)
            cluster.wait_for_replicas(replicas)
            yield "ray", replicas, measured(cluster.port, replicas, arguments)


def rates_in_turn(model: Path, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Tokens per second of each round, by the way to one replica."""
    with (
        serving(model) as server,
        on_ray(model, 1, direct=True) as ray,
        on_ray(model, 1, direct=False) as proxied,
    ):
        ports = {"direct": server.port, "ray": ray.port, _PROXY: proxied.port}
        rates: dict[str, list[float]] = {way: [] for way in ports}
        for port in ports.values():
            round_of(port, arguments.streams, 5)
        for _ in range(arguments.rounds):
            for way, port in ports.items():
                rates[way].append(round_of(port, arguments.streams, arguments.tokens).rate)
    return rates


def saturated(folder: Path, arguments: argparse.Namespace) -> Table:
    """The throughput of the ways to one replica, and its ratio to that of Ray's own proxy."""
    model = scripted_model(folder / "model", **{"option.max_rolling_batch_size": arguments.streams})
    rates = rates_in_turn(model, arguments)
    table = Table("way", "tok/s", "ratio", "least", "greatest")
    for way, rounds in rates.items():
        ratios = [rate / proxied for rate, proxied in zip(rounds, rates[_PROXY], strict=True)]
        figures = (statistics.median(ratios), min(ratios), max(ratios))
        table.add_row(way, f"{statistics.median(rounds):.0f}", *(f"{figure:.2f}" for figure in figures))
    return table


def bounded(folder: Path, arguments: argparse.Namespace) -> Table:
    """What clients get of an engine of known rate."""
    table = Table("way", "replicas", "tok/s", "share", "TTFT ms", "p99", "ITL ms", "p99")
    places = {"option.max_rolling_batch_size": arguments.streams}
    model = scripted_model(folder / "model", {"steps_per_second": arguments.steps}, **places)
    for way, replicas, got in rows(model, arguments):
        offered = replicas * arguments.streams * arguments.steps
        figures = (f"{got.rate:.0f}", f"{got.rate / offered:.2f}", f"{got.ttft:.1f}", f"{got.ttft_p99:.1f}")
        table.add_row(way, str(replicas), *figures, f"{got.itl:.1f}", f"{got.itl_p99:.1f}")
        Console(stderr=True).print(way, replicas, *figures)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, default=16, help="of a replica")
    parser.add_argument("--steps", type=float, default=50, help="tokens per second of a stream")
    parser.add_argument("--tokens", type=int, default=250, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saturated", action="store_true", help="an engine as fast as its streams are read")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table = (saturated if arguments.saturated else bounded)(Path(folder), arguments)
    Console().print(table)


if __name__ == "__main__":
    main()
