"""What Ray Serve costs: replicas of a scripted engine of known rate, on a cluster of this machine (docs/ray.md).

    python -m benchmarks.ray_serve [--replicas 1 2 4] [--streams 16] [--steps 50] [--tokens 250] [--rounds 3]

Every stream gets `--steps` tokens per second, and a replica has place for `--streams`: what a replica offers is their
product. `share` is the throughput over that of all replicas. The first rows compare ways to one replica: `direct` is
the server without Ray, `ray` is HAProxy in front of replicas, `ray, python proxy` is Ray's own proxy. TTFT and ITL are
medians and the 99th percentiles of the clients; the ITL of an engine that nothing delays is 1 / `--steps`. Each figure
is the median over the rounds. Cluster, replicas, engines and clients share the machine's cores.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile, post, run_streams, time_to_first_token, wall_seconds
from benchmarks.servers import serving
from djl_trtllm.bench.streams import Stream
from tests.support.models import PROMPT, scripted_model
from tests.support.ray_cluster import RayCluster


@dataclass
class Figures:
    """Of one round: tokens per second, milliseconds."""

    rate: float
    ttft: float
    ttft_p99: float
    itl: float
    itl_p99: float

    @classmethod
    def of(cls, streams: list[Stream]) -> Figures:
        first = [time_to_first_token(stream) * 1e3 for stream in streams]
        gaps = [(late - early) * 1e3 for stream in streams for early, late in pairwise(stream.times)]
        rate = sum(stream.tokens for stream in streams) / wall_seconds(streams)
        return cls(rate, percentile(first, 0.5), percentile(first, 0.99), percentile(gaps, 0.5), percentile(gaps, 0.99))


def measured(port: int, replicas: int, arguments: argparse.Namespace) -> Figures:
    """The median of each figure over the rounds, after a short one."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": arguments.tokens, "ignore_eos": True}, "stream": True}
    warm = {**body, "parameters": {"max_new_tokens": 5}}
    run_streams(port, [post("/invocations", warm)] * arguments.streams * replicas)
    requests = [post("/invocations", body)] * arguments.streams * replicas
    rounds = [astuple(Figures.of(run_streams(port, requests))) for _ in range(arguments.rounds)]
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
        yield "ray, python proxy", 1, measured(cluster.port, 1, arguments)
    with on_ray(model, max(arguments.replicas), direct=True) as cluster:
        for replicas in arguments.replicas:
            cluster.deploy(model, replicas=replicas)
            cluster.wait_for_replicas(replicas)
            yield "ray", replicas, measured(cluster.port, replicas, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, default=16, help="of a replica")
    parser.add_argument("--steps", type=float, default=50, help="tokens per second of a stream")
    parser.add_argument("--tokens", type=int, default=250, help="of a stream")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    columns = ("way", "replicas", "tok/s", "share", "TTFT ms", "p99", "ITL ms", "p99")
    table = Table(*columns)
    with tempfile.TemporaryDirectory() as folder:
        script = {"steps_per_second": arguments.steps}
        places = {"option.max_rolling_batch_size": arguments.streams}
        model = scripted_model(Path(folder) / "model", script, **places)
        for way, replicas, got in rows(model, arguments):
            offered = replicas * arguments.streams * arguments.steps
            figures = (f"{got.rate:.0f}", f"{got.rate / offered:.2f}", f"{got.ttft:.1f}", f"{got.ttft_p99:.1f}")
            table.add_row(way, str(replicas), *figures, f"{got.itl:.1f}", f"{got.itl_p99:.1f}")
            Console(stderr=True).print(way, replicas, *figures)
    Console().print(table)


if __name__ == "__main__":
    main()
