"""What the server costs: the scripted executor through the whole road, beside a bare uvicorn application.

    python benchmarks/ceiling.py [--streams 64 256] [--seconds 10] [--offered 28000] [--executor tensorrt_llm]
    python benchmarks/ceiling.py --api jsonlines chat [...] [--rounds 5] [--before CHECKOUT]

Everything above the executor is real: host process, messages, rolling batch, detokeniser, dialect, HTTP. The measure
is streamed tokens per CPU-second of the server process (its engine process not counted), because client, server and
engine share the machine. `saturated`: the engine is faster than the server. `paced`: it offers a fixed rate, one token
for every stream per step; added inter-token latency is the client's p99 less the step's period. The bare application
streams as many tokens, in chunks of the size that the server was seen to send.

With `--executor tensorrt_llm` the paced run goes through TensorRT-LLM's executor and the fake TensorRT-LLM's engine
backend, whose objects do per response in the engine process what the real ones do (tests/fakes): 28,000 tokens per
second is the rate published for Llama 3.1 8B in FP8 on an H200. The host's CPU time is a column of its own.

With `--api` one server answers the streams of several APIs in turns, and with `--before` so does a server of another
checkout. The figures are medians over the rounds, the ratios those of each round to its first row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from load import percentile, post, run_streams
from rich.console import Console
from rich.table import Table
from servers import TICK, Server, cpu_seconds, free_port, serving, started

from tests.support.models import scripted_model, tensorrt_llm_model

PROMPT = "the little red riding hood went into the dark wood to see her grandmother and there she met the wolf"

MESSAGES = [{"role": "user", "content": PROMPT}]
APIS: dict[str, tuple[str, dict[str, Any], str]] = {
    "jsonlines": ("/invocations", {"inputs": PROMPT, "parameters": {}, "stream": True}, "max_new_tokens"),
    "jsonlines_chat": ("/invocations", {"messages": MESSAGES, "stream": True}, "max_tokens"),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, "max_tokens"),
    "completions": ("/v1/completions", {"prompt": PROMPT, "stream": True}, "max_tokens"),
    "tgi": ("/generate_stream", {"inputs": PROMPT, "parameters": {}}, "max_new_tokens"),
    "triton": ("/v2/models/ensemble/generate_stream", {"text_input": PROMPT}, "max_tokens"),
    "truss": ("/predict", {"prompt": PROMPT}, "max_tokens"),
}
"""By name: path, body of a stream, and the parameter with the number of tokens."""


@dataclass
class Measured:
    """One run."""

    tokens_per_cpu_second: float
    tokens_per_second: float
    cpu_share: float
    tokens_per_chunk: float
    latency: float | None = None
    host_share: float = 0.0


def measure(process: psutil.Process, port: int, requests: list[bytes], period: float | None) -> Measured:
    hosts = process.children()
    before, host_before = cpu_seconds(process), sum(map(cpu_seconds, hosts))
    results = run_streams(port, requests)
    cpu, host_cpu = max(TICK, cpu_seconds(process) - before), sum(map(cpu_seconds, hosts)) - host_before
    failures = [result.failed for result in results if result.failed]
    if failures:
        sys.exit(f"{len(failures)} streams failed, the first with: {failures[0]}")
    tokens = sum(result.tokens for result in results)
    seconds = max(r.arrivals[-1][0] for r in results) - min(r.arrivals[0][0] for r in results)
    # Stream by stream, because they do not all begin at once.
    told = [result for result in results if len(result.arrivals) > 1]
    rate = sum((r.tokens - r.arrivals[0][1]) / (r.arrivals[-1][0] - r.arrivals[0][0]) for r in told)
    chunks = sum(len(result.arrivals) for result in results)
    latency = None
    if period is not None:
        latency = percentile([gap for result in results for gap in result.intervals()], 0.99) - period
    return Measured(tokens / cpu, rate, cpu / seconds, tokens / chunks, latency, host_cpu / seconds)


def ours_measured(root: Path, executor: str, streams: int, steps_per_second: float, tokens: int) -> Measured:
    directory = root / f"model-{len(list(root.iterdir()))}"
    script = {"steps_per_second": steps_per_second}
    options = {"option.max_rolling_batch_size": 256}
    environ: dict[str, str] = {}
    if executor == "tensorrt_llm":
        model, environ = tensorrt_llm_model(directory, script, **{"option.backend": "tensorrt"}, **options)
    else:
        model = scripted_model(directory, script, **options)
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}, "stream": True}
    with serving(model, root, **environ) as server:
        run_streams(server.port, [post("/invocations", {**body, "parameters": {"max_new_tokens": 8}})] * streams)
        period = 1 / steps_per_second if steps_per_second else None
        return measure(server.process, server.port, [post("/invocations", body)] * streams, period)


def bare_measured(streams: int, steps_per_second: float, tokens: int, tokens_per_chunk: int) -> Measured:
    port = free_port()
    body = {"chunks": tokens // tokens_per_chunk, "tokens_per_chunk": tokens_per_chunk}
    app = str(Path(__file__).parent / "bare_app.py")
    with started([sys.executable, app], port, PORT=str(port), STEPS_PER_SECOND=str(steps_per_second)) as process:
        run_streams(port, [post("/stream", {"chunks": 8, "tokens_per_chunk": 1})] * streams)
        period = 1 / steps_per_second if steps_per_second else None
        return measure(process, port, [post("/stream", body)] * streams, period)


def stream_of(api: str, tokens: int) -> bytes:
    """The request for a stream."""
    path, body, limit = APIS[api]
    if "parameters" in body:
        return post(path, {**body, "parameters": {limit: tokens}})
    return post(path, {**body, limit: tokens})


def cost(server: Server, api: str, streams: int, tokens: int) -> float:
    """Streamed tokens per CPU-second of the server process."""
    generated = server.metric("generated_tokens_total")
    before = cpu_seconds(server.process)
    results = run_streams(server.port, [stream_of(api, tokens)] * streams)
    spent = max(TICK, cpu_seconds(server.process) - before)
    generated = server.metric("generated_tokens_total") - generated
    failures = [result.failed for result in results if result.failed]
    if failures:
        sys.exit(f"{len(failures)} streams of {api} failed, the first with: {failures[0]}")
    if generated != streams * tokens:
        sys.exit(f"{streams} streams of {api} had {generated:.0f} tokens, not {tokens} each")
    return generated / spent


def compare(arguments: argparse.Namespace, folder: Path) -> Table:
    """Several APIs of one server in turns, and the first of them on a server of another checkout."""
    title = "Streamed tokens per CPU-second of the server process, medians"
    table = Table("load", "streams", "API", "tok per CPU-s", "ratio", "ratios", title=title)
    for streams in arguments.streams:
        for load, steps, rate in (
            ("saturated", 0.0, 100_000),
            ("paced", arguments.offered / streams, arguments.offered),
        ):
            tokens = max(16, int(arguments.seconds * rate / streams))
            script = {"steps_per_second": steps}
            model = scripted_model(folder / f"{load}-{streams}", script, **{"option.max_rolling_batch_size": 256})
            with ExitStack() as stack:
                now = stack.enter_context(serving(model, folder))
                contestants = [(api, now, api) for api in arguments.api]
                if arguments.before:
                    code = {"PYTHONPATH": arguments.before, "PYTHONSAFEPATH": "1"}
                    before = stack.enter_context(serving(model, folder, **code))
                    contestants.append((f"{arguments.api[0]}, before", before, arguments.api[0]))
                found: dict[str, list[float]] = {name: [] for name, _, _ in contestants}
                for _, server, api in contestants:
                    cost(server, api, streams, 8)
                for _ in range(arguments.rounds):
                    for name, server, api in contestants:
                        found[name].append(cost(server, api, streams, tokens))
                    contestants.reverse()
            first = found[arguments.api[0]]
            for name, costs in found.items():
                ratios = [one / other for one, other in zip(costs, first, strict=True)]
                spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
                median = f"{statistics.median(costs):,.0f}"
                table.add_row(load, str(streams), name, median, f"{statistics.median(ratios):.2f}", spread)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="roughly, per run")
    parser.add_argument("--offered", type=float, default=28_000, help="tokens per second of the paced runs")
    parser.add_argument("--executor", choices=["scripted", "tensorrt_llm"], default="scripted")
    parser.add_argument("--api", choices=APIS, nargs="+", help="compare these, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of each API")
    parser.add_argument("--before", help="another checkout, to compare the first API with")
    arguments = parser.parse_args()
    if arguments.api:
        with tempfile.TemporaryDirectory() as folder:
            Console(width=140).print(compare(arguments, Path(folder)))
        return
    table = Table(title="Streamed tokens per CPU-second of the server process")
    for column in (
        "load",
        "streams",
        "server",
        "tok per CPU-s",
        "tok/s",
        "CPU-s per s",
        "host CPU-s per s",
        "tok per chunk",
        "added ITL p99",
    ):
        table.add_column(column, justify="left" if column in ("load", "server") else "right")

    def row(load: str, streams: int, server: str, m: Measured) -> None:
        latency = "" if m.latency is None else f"{m.latency * 1000:.1f} ms"
        cells = (f"{m.tokens_per_cpu_second:,.0f}", f"{m.tokens_per_second:,.0f}", f"{m.cpu_share:.2f}")
        host = f"{m.host_share:.2f}" if m.host_share else ""
        table.add_row(load, str(streams), server, *cells, host, f"{m.tokens_per_chunk:.1f}", latency)

    with tempfile.TemporaryDirectory() as folder:
        for streams in arguments.streams:
            if arguments.executor == "scripted":
                tokens = max(16, int(arguments.seconds * 100_000 / streams))
                saturated = ours_measured(Path(folder), "scripted", streams, 0, tokens)
                row("saturated", streams, "djl-trtllm", saturated)
                chunk = max(1, round(saturated.tokens_per_chunk))
                row("saturated", streams, "bare uvicorn", bare_measured(streams, 0, tokens, chunk))
            steps = arguments.offered / streams
            tokens = max(16, int(arguments.seconds * steps))
            paced = ours_measured(Path(folder), arguments.executor, streams, steps, tokens)
            row(f"{arguments.offered:,.0f} tok/s", streams, "djl-trtllm", paced)
            bare = bare_measured(streams, steps, tokens, 1)
            row(f"{arguments.offered:,.0f} tok/s", streams, "bare uvicorn", bare)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
