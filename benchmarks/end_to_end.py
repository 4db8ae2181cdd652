"""What is left of the engine's speed over HTTP: a model served, beside the raw executor in its own process.

    python -m benchmarks.end_to_end [MODEL] [--streams 1 16 32 64] [--runs 5] [--tokens 128] [--engine-threads N]
        [--stream-interval default 1 4]

Both run the same compiled engine with the same options on the same prompts, in turns; the ratio is the median over the
runs, because single runs of the raw executor spread by 20 %. Streams are jsonlines with log-probabilities, as the LMI
schema has them; the raw executor computes them too. The last row prefills prompts of 2,000 tokens.

Each `--stream-interval` is a server with that `option.stream_interval`, or without it. ITL gives tokens that arrive
together equal shares of the time before them; `between chunks` is that time.

The engine's threads use every core, so what server and client use is taken from the engine: their CPU time for a token
is in the table. `--engine-threads` leaves cores to them, as an engine on a GPU does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import statistics
from itertools import pairwise
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.batches import BEGINNINGS, MODEL, Peer
from benchmarks.load import Burst, compared, percentile, post, run_streams
from benchmarks.servers import Server, cpu_seconds, of_the_shell, serving
from djl_trtllm.bench.client import Stream
from djl_trtllm.service.model import Model, open_source, prepare

OPTIONS = {
    "OPTION_MAX_INPUT_LEN": "2200",
    "OPTION_MAX_OUTPUT_LEN": "1000",
}
DEFAULT = "default"
_BUCKET = re.compile(r'djl_trtllm_event_loop_stall_seconds_bucket\{le="([^"]+)".*\} ([0-9.]+)')


def stall_buckets(server: Server) -> dict[str, float]:
    return {bound: float(count) for bound, count in _BUCKET.findall(server.http.get("/metrics").text)}


def stall_p99(before: dict[str, float], after: dict[str, float]) -> str:
    """The bucket in which the 99th percentile lies, in milliseconds."""
    total = after["+Inf"] - before["+Inf"]
    for bound, count in after.items():
        if count - before[bound] >= 0.99 * total:
            return f"≤ {float(bound) * 1000:g}" if bound != "+Inf" else "> 120,000"
    return "?"


def served(server: Server, prompts: list[str], tokens: int) -> tuple[float, list[Stream]]:
    parameters = {"max_new_tokens": tokens, "ignore_eos_token": True}
    requests = [post("/invocations", {"inputs": p, "parameters": parameters, "stream": True}) for p in prompts]
    results = run_streams(server.port, requests)
    return Burst.of(results).rate, results


class Measured:
    """The runs of one server with one load."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stalls = stall_buckets(server)
        self._cpu = [0.0, 0.0]
        self._streams: list[Stream] = []
        self.speeds: list[float] = []

    def run(self, prompts: list[str], tokens: int) -> None:
        processes = (self._server.process, psutil.Process())
        before = [cpu_seconds(process) for process in processes]
        speed, streams = served(self._server, prompts, tokens)
        self._cpu = [
            total + cpu_seconds(process) - began
            for total, process, began in zip(self._cpu, processes, before, strict=True)
        ]
        self.speeds.append(speed)
        self._streams += streams

    def columns(self, raw: list[float]) -> list[str]:
        streams, all_of_them = self._streams, Burst.of(self._streams)
        first, gaps = ([1000 * each for each in values] for values in (all_of_them.first, all_of_them.between))
        generated = sum(stream.tokens for stream in streams)
        chunks = [(later - earlier) * 1000 for stream in streams for earlier, later in pairwise(stream.times)]
        return [
            f"{statistics.median(self.speeds):,.0f}",
            f"{statistics.median(raw):,.0f}",
            *compared(self.speeds, raw),
            f"{percentile(first, 0.5):.0f} / {percentile(first, 0.99):.0f}",
            f"{percentile(gaps, 0.5):.1f} / {percentile(gaps, 0.99):.1f}",
            f"{percentile(chunks, 0.5):.1f} / {percentile(chunks, 0.99):.1f}",
            ", ".join(f"{seconds / generated * 1e6:.0f}" for seconds in self._cpu),
            stall_p99(self._stalls, stall_buckets(self._server)),
        ]


def measure(
    table: Table,
    name: str,
    servers: dict[str, Server],
    raw: Peer,
    model: Model,
    prompts: list[str],
    tokens: int,
    runs: int,
) -> None:
    """Run every server and the raw executor in turns, and add a row for each server."""
    ids = [model.tokenizer.encode(prompt) for prompt in prompts]
    measured = {interval: Measured(server) for interval, server in servers.items()}
    raw_speeds: list[float] = []
    for _ in range(runs):
        for each in measured.values():
            each.run(prompts, tokens)
        raw_speeds.append(raw.rate(ids, tokens))
    for interval, each in measured.items():
        table.add_row(name, interval, *each.columns(raw_speeds))


def with_interval(interval: str) -> dict[str, str]:
    return {} if interval == DEFAULT else {"OPTION_STREAM_INTERVAL": interval}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 32, 64])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--engine-threads", type=int, metavar="N")
    parser.add_argument("--stream-interval", nargs="+", default=[DEFAULT], metavar="N")
    arguments = parser.parse_args()
    logging.basicConfig(level="WARNING")
    environ = of_the_shell(**OPTIONS, OPTION_MAX_ROLLING_BATCH_SIZE=str(max(16, *arguments.streams)))
    if arguments.engine_threads is not None:
        environ["OPTION_INFERENCE_NUM_THREADS"] = str(arguments.engine_threads)
    model = prepare(open_source(arguments.model, environ))
    table = Table(title=f"{arguments.model.name}, {arguments.tokens} tokens per stream, {arguments.runs} runs each")
    for column in ("streams", "interval", "served tok/s", "raw tok/s", "ratio", "spread", "TTFT ms", "ITL ms"):
        table.add_column(column, justify="right")
    table.add_column("between chunks ms", justify="right")
    table.add_column("CPU µs per token", justify="right")
    table.add_column("loop stall p99 ms", justify="right")
    raw = Peer("raw", json.dumps(model.start.options))
    with contextlib.ExitStack() as stack:
        stack.callback(raw.close)
        servers = {
            interval: stack.enter_context(serving(arguments.model, **environ, **with_interval(interval)))
            for interval in arguments.stream_interval
        }
        warm = [BEGINNINGS[0]] * max(arguments.streams)
        for server in servers.values():
            served(server, warm, arguments.tokens)
        raw.run([model.tokenizer.encode(prompt) for prompt in warm], arguments.tokens)
        for streams in arguments.streams:
            prompts = [BEGINNINGS[number % len(BEGINNINGS)] for number in range(streams)]
            measure(table, str(streams), servers, raw, model, prompts, arguments.tokens, arguments.runs)
        long = " ".join(["the wolf went into the wood and"] * 400)
        long = model.tokenizer.decode(model.tokenizer.encode(long)[:1990])
        measure(table, "16 long", servers, raw, model, [long] * 16, 16, arguments.runs)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
