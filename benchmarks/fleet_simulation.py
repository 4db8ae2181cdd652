"""A fleet of servers in simulated time: how many replicas a load needs, and what autoscaling and cold starts cost.

    python -m benchmarks.fleet_simulation [--streams 1 10 1000 100000]     # fixed fleets
    python -m benchmarks.fleet_simulation --trace burst --streams 1000     # autoscaling: diurnal, burst or a CSV file
    python -m benchmarks.fleet_simulation --streams 179200 --attempts 4 --deaths 1 --at-random     # bad nights
    python -m benchmarks.fleet_simulation --check                          # beside a real server, and four of them

A replica's places are those of the project's sizing, for a model and a GPU. Its speed is given: the defaults are an
assumption for an 8-billion-parameter model in FP8 on an H200 (docs/scale.md has the source of each). The rules of
autoscaling are those that the project ships. A CSV file is one of Azure's traces of LLM inference.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.fleet.arrivals import Lengths, Rate, Request, arrivals, burst, diurnal, read_trace, steady
from benchmarks.fleet.measured import ALONE, FLEET, Row, compare
from benchmarks.fleet.replica import Gpu
from benchmarks.fleet.rules import Fixed, Keda, Ray, Rule
from benchmarks.fleet.simulation import ColdStart, Fleet, Result, Simulation, Troubles
from benchmarks.load import percentile
from djl_trtllm.config import Options
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.files import read_table
from djl_trtllm.sizing.estimate import Conditions, Estimate
from djl_trtllm.sizing.machines import gpu_named
from tools.sizing.check_tables import model_sizes

FULL = 0.7
"""How full batches are to be, see docs/kubernetes.md."""
_MOST_REQUESTS = 1_000_000
"""Requests of a row at most: a large fleet is simulated for a shorter time."""


def estimate_of(arguments: argparse.Namespace) -> Estimate:
    """The memory of a replica."""
    conditions = Conditions(
        gpu_named(arguments.gpu).memory,
        tensor_parallel=arguments.tp,
        quantization=arguments.quantize,
        max_batch_size=arguments.batch,
        max_input_len=4 * arguments.prompt,
        max_output_len=4 * arguments.output,
    )
    return Estimate(model_sizes(arguments.model), conditions)


def fleet_of(arguments: argparse.Namespace, *, cached: bool = True) -> Fleet:
    """A replica of the arguments."""
    estimate = estimate_of(arguments)
    most = estimate.sequences_of(arguments.prompt + arguments.output)
    places = min(estimate.conditions.max_batch_size, most)
    if not places:
        sys.exit(f"{arguments.model} has no room for a sequence on {arguments.tp} x {arguments.gpu}")
    weights = estimate.weights * arguments.tp
    cold = ColdStart(
        machine=arguments.machine,
        download=weights / arguments.download,
        compiling=0 if cached else arguments.compiling,
        loading=arguments.loading,
    )
    speed = Gpu(arguments.alone, arguments.full, arguments.batch, arguments.prefill)
    return Fleet(speed, arguments.batch, places, Options().job_queue_size, cold, arguments.drain)


def replicas_for(fleet: Fleet, streams: float) -> int:
    """The number of replicas that keeps their places `FULL`."""
    return math.ceil(streams / (FULL * fleet.places))


def rate_of(fleet: Fleet, arguments: argparse.Namespace, streams: float) -> float:
    """Requests per second that keep this number of streams running on `replicas_for` them."""
    running = max(1, round(streams / replicas_for(fleet, streams)))
    # A prompt holds up the other streams of its replica, and during a stream as many requests come as run beside it.
    prefill = running * fleet.speed.prefill_seconds(arguments.prompt)
    seconds: float = arguments.output * fleet.speed.step_seconds(running) + prefill
    return streams / seconds


def requests_of(arguments: argparse.Namespace, rate: float, seconds: float) -> Iterator[Request]:
    """The trace of the arguments, with this mean rate."""
    lengths = Lengths(arguments.prompt, arguments.output)
    kinds: dict[str, tuple[Rate, float]] = {
        "poisson": (steady(rate), rate),
        "diurnal": (diurnal(rate, seconds), 1.8 * rate),
        "burst": (burst(rate, arguments.factor, seconds / 4, seconds / 4), rate * arguments.factor),
    }
    if arguments.trace not in kinds:
        return read_trace(Path(arguments.trace), arguments.speed)
    return arrivals(*kinds[arguments.trace], seconds, lengths, arguments.seed)


def troubles_of(arguments: argparse.Namespace, replicas: int, seconds: float) -> Troubles:
    """What goes wrong in a fleet of about this number of replicas."""
    chance, now, deaths = random.Random(arguments.seed), 0.0, list[float]()
    rate = arguments.deaths * replicas / 86_400
    while rate and (now := now + chance.expovariate(rate)) < seconds:
        deaths.append(now)
    return Troubles(arguments.attempts, arguments.pause, tuple(deaths), arguments.at_random)


def row_of(result: Result) -> tuple[str, ...]:
    """The figures of a run."""
    first = result.first_tokens()
    return (
        f"{result.replica_seconds / result.seconds:.1f}",
        f"{result.most_replicas}",
        f"{len(result.requests):,}",
        f"{result.request_seconds / result.seconds:,.0f}",
        f"{result.tokens_per_second:,.0f}",
        *(f"{percentile(first, share):.2f}" if first else "" for share in (0.5, 0.99)),
        f"{result.attempts['refused']:,}",
        f"{result.attempts['cut']:,}",
        f"{len(result.requests) - len(result.of('complete')):,}",
        f"{result.replica_seconds / 3600:.1f}",
    )


def table_of(title: str, *names: str) -> Table:
    figures = ("replicas", "at most", "requests", "streams", "tok/s", "TTFT p50 s", "p99 s")
    return Table(*names, *figures, "refused", "cut", "given up", "hours", title=title)


def fixed_fleets(arguments: argparse.Namespace) -> Table:
    """A row for each number of streams: as many replicas as keep batches `FULL`."""
    fleet = fleet_of(arguments)
    table = table_of(f"{arguments.model}, {arguments.tp} x {arguments.gpu}, {fleet.places} places", "asked")
    for streams in arguments.streams:
        rate = rate_of(fleet, arguments, streams)
        seconds = min(arguments.seconds, _MOST_REQUESTS / rate)
        # The first third fills the replicas.
        replicas = Fixed(replicas_for(fleet, streams))
        troubles = troubles_of(arguments, replicas.least, seconds)
        simulation = Simulation(fleet, replicas, seconds / 3, seconds, troubles)
        result = simulation.run(requests_of(arguments, rate, seconds))
        table.add_row(f"{streams:,}", *row_of(result))
    return table


def scaled_fleets(arguments: argparse.Namespace) -> Iterator[Table]:
    """A table for each number of streams: both rules, with a fleet's cache of engines and without."""
    for streams in arguments.streams:
        fleets = {cached: fleet_of(arguments, cached=cached) for cached in (True, False)}
        fleet = fleets[True]
        rate = rate_of(fleet, arguments, streams)
        least = arguments.least or replicas_for(fleet, streams)
        most = max(least, arguments.most or 10 * least)
        rules: dict[str, Callable[[], Rule]] = {
            "KEDA": partial(Keda, least, most),
            "Ray": partial(Ray, least, most, max(1, round(FULL * fleet.batch))),
            "fixed": partial(Fixed, least),
        }
        table = table_of(f"{arguments.trace}, {streams:,} streams, {least} to {most} replicas", "rule", "cold start s")
        for name, rule in rules.items():
            for each in fleets.values() if name != "fixed" else [fleet]:
                troubles = troubles_of(arguments, least, arguments.seconds)
                simulation = Simulation(each, rule(), end=arguments.seconds, troubles=troubles)
                result = simulation.run(requests_of(arguments, rate, arguments.seconds))
                table.add_row(name, f"{each.cold_start.seconds:.0f}", *row_of(result))
        yield table


def check(arguments: argparse.Namespace) -> int:
    """Print simulated beside measured, of a replica and of a fleet. Returns the exit status, which is the replica's."""
    rows = compare(ALONE, arguments.check_seconds, arguments.seed)
    Console().print(_beside("a replica", rows))
    Console().print(_beside("two to four replicas", compare(FLEET, arguments.check_fleet_seconds, arguments.seed)))
    wrong = [row.name for row in rows if row.off > arguments.tolerance]
    if wrong:
        print(f"beyond {arguments.tolerance:.0%}: {', '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


def _beside(title: str, rows: list[Row]) -> Table:
    table = Table("figure", "simulated", "measured", "off by", title=title)
    for row in rows:
        table.add_row(row.name, f"{row.simulated:.3f}", f"{row.measured:.3f}", f"{row.off:.1%}")
    return table


def positive(text: str) -> int:
    """Parse a number of things, at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return number


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = partial(parser.add_argument)
    add("--trace", default="poisson", help="poisson (fixed fleets), diurnal, burst, or a CSV file")
    add("--streams", type=positive, nargs="+", default=[1, 10, 1000, 100_000], help="that run at a time, on average")
    add("--seconds", type=float, default=3600, help="of arrivals")
    add("--seed", type=int, default=7)
    add("--factor", type=float, default=4, help="of a burst")
    add("--speed", type=float, default=1, help="of a CSV file")
    add("--least", type=positive, help="replicas; default: those of a steady load")
    add("--most", type=positive, help="replicas; default: ten times the least")
    add("--model", default="LLaMA 3 8B", choices=sorted(read_table("models.toml", "tools.sizing")), metavar="NAME")
    add("--gpu", default="h200")
    add("--tp", type=positive, default=1)
    add("--quantize", default="fp8")
    add("--batch", type=positive, default=256, help="max_rolling_batch_size")
    add("--prompt", type=positive, default=1000, help="mean tokens")
    add("--output", type=positive, default=500, help="mean tokens")
    add("--alone", type=float, default=200, help="tokens per second of a stream that is alone")
    add("--full", type=float, default=28_000, help="tokens per second of a full batch")
    add("--prefill", type=float, default=100_000, help="tokens per second of prompts")
    add("--machine", type=float, default=90, help="seconds until a new machine runs a container")
    add("--download", type=float, default=700e6, help="bytes per second")
    add("--compiling", type=float, default=600, help="seconds")
    add("--loading", type=float, default=30, help="seconds")
    add("--drain", type=float, default=130, help="seconds: preStop and shutdown_timeout of the Deployment")
    add("--check", action="store_true", help="compare a replica with a real server, and a fleet with four")
    add("--attempts", type=positive, default=1, help="of a client whose request was refused or cut")
    add("--pause", type=float, default=1, help="seconds before a second attempt; doubled before each other")
    add("--deaths", type=float, default=0, help="of a replica in a day")
    add("--at-random", action="store_true", help="any replica gets a request, not the least loaded one")
    add("--check-seconds", type=float, default=15)
    add("--check-fleet-seconds", type=float, default=150)
    add("--tolerance", type=float, default=0.15)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse()
    if arguments.check:
        sys.exit(check(arguments))
    try:
        for table in [fixed_fleets(arguments)] if arguments.trace == "poisson" else scaled_fleets(arguments):
            Console(width=150).print(table)
    except (DjlTrtllmError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
