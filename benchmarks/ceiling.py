"""What the server costs: the scripted executor through the whole server, beside a bare uvicorn application.

    python -m benchmarks.ceiling [--streams 64 256] [--seconds 10] [--offered 28000 56000] [--svg FOLDER]
                                 [--executor tensorrt_llm] [--apart]
    python -m benchmarks.ceiling --api jsonlines chat [...] [--rounds 5] [--before CHECKOUT] [--tokens 1]

Everything above the executor is real: engine process, messages, rolling batch, detokeniser, dialect, HTTP. The measure
is streamed tokens per CPU-second of the server process (its engine process not counted), because client, server and
engine share the machine. `saturated`: the engine is faster than the server. `paced`: it offers a fixed rate, one token
for every stream per step; added inter-token latency is the client's p99 less the step's period. The bare application
streams as many tokens, in chunks of the size that the server was seen to send. `tok/s` are tokens over wall time, from
the first request to the last token. The server's batch size is the number of streams, so that all run at once.

With `--executor tensorrt_llm` the paced run goes through TensorRT-LLM's executor and the fake TensorRT-LLM's engine
backend, whose objects do per response in the engine process what the real ones do (tests/fakes): 28,000 tokens per
second is the rate published for Llama 3.1 8B in FP8 on an H200. The CPU time of the engine process
is a column of its own.

With `--apart` the server has a core of its own, and its engine process and the client have the others. Otherwise they
may run on each other's, where each waits for the scheduler's time slices.

With `--api` one server answers the streams of several APIs in turns, and with `--before` so does a server of another
checkout. The figures are medians over the rounds, the ratios those of each round to its first row, and of the other
checkout to the same API. `--tokens` is the length of a stream, with one burst of all streams after another: with one
token, what a request costs. (With OpenAI's eight: the scripted engine repeats the prompt, and they do not show the
special tokens that it begins with.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.load import Post, compared, intervals, percentile, post, run_streams, wall_seconds
from benchmarks.servers import TICK, Server, cpu_seconds, free_port, serving, started
from djl_trtllm.bench.client import EventReader, Reader, Stream, TokenReader
from djl_trtllm.bench.report import Chart, Line, picture
from tests.support.models import scripted_model, tensorrt_llm_model

CORES = sorted(os.sched_getaffinity(0))
PROMPT = "the little red riding hood went into the dark wood to see her grandmother and there she met the wolf"

OURS, BARE = "djl-trtllm", "bare uvicorn"
MESSAGES = [{"role": "user", "content": PROMPT}]
APIS: dict[str, tuple[str, dict[str, Any], str, Callable[[Stream], Reader]]] = {
    "jsonlines": ("/invocations", {"inputs": PROMPT, "parameters": {}, "stream": True}, "max_new_tokens", TokenReader),
    "jsonlines_chat": ("/invocations", {"messages": MESSAGES, "stream": True}, "max_tokens", EventReader),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, "max_tokens", EventReader),
    "completions": ("/v1/completions", {"prompt": PROMPT, "stream": True}, "max_tokens", EventReader),
    "tgi": ("/generate_stream", {"inputs": PROMPT, "parameters": {}}, "max_new_tokens", TokenReader),
    "triton": ("/v2/models/ensemble/generate_stream", {"text_input": PROMPT}, "max_tokens", EventReader),
    "truss": ("/predict", {"prompt": PROMPT}, "max_tokens", Reader),
}
"""The APIs by name: path, body of a stream, the parameter with the number of tokens, and how its body is read."""


@dataclass
class Measured:
    """One run. Shares are CPU-seconds per second; `latency` is what is added to the p99 of the step's period."""

    tokens_per_cpu_second: float
    tokens_per_second: float
    cpu_share: float
    tokens_per_chunk: float
    latency: float | None = None
    host_share: float = 0.0


def measure(process: psutil.Process, port: int, requests: list[Post], period: float | None) -> Measured:
    hosts = process.children()
    before, host_before = cpu_seconds(process), sum(map(cpu_seconds, hosts))
    results = run_streams(port, requests)
    cpu, host_cpu = max(TICK, cpu_seconds(process) - before), sum(map(cpu_seconds, hosts)) - host_before
    tokens, seconds = sum(result.tokens for result in results), wall_seconds(results)
    chunks = sum(len(result.times) for result in results)
    latency = None
    if period is not None:
        latency = percentile([gap for result in results for gap in intervals(result)], 0.99) - period
    return Measured(tokens / cpu, tokens / seconds, cpu / seconds, tokens / chunks, latency, host_cpu / seconds)


def sized_for(streams: int, steps_per_second: float) -> tuple[dict[str, object], dict[str, object]]:
    """Script and options of a server that runs this number of streams at once."""
    script: dict[str, object] = {"steps_per_second": steps_per_second, "max_sequences": streams}
    return script, {"option.max_rolling_batch_size": streams}


def keep_apart(server: psutil.Process) -> None:
    """Move the server to the last core that this program may use, its children and this process to the others."""
    *others, last = CORES
    for cores, processes in (({last}, [server]), (set(others), [psutil.Process(), *server.children()])):
        for process in processes:
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cores)


def ours_measured(
    root: Path, executor: str, streams: int, steps_per_second: float, tokens: int, *, apart: bool
) -> Measured:
    directory = root / f"model-{len(list(root.iterdir()))}"
    script, options = sized_for(streams, steps_per_second)
    environ: dict[str, str] = {}
    if executor == "tensorrt_llm":
        model, environ = tensorrt_llm_model(directory, script, **{"option.backend": "tensorrt"}, **options)
    else:
        model = scripted_model(directory, script, **options)
    with serving(model, root, **environ) as server:
        run_streams(server.port, [stream_of("jsonlines", 8)] * streams)
        period = 1 / steps_per_second if steps_per_second else None
        if apart:
            keep_apart(server.process)
        return measure(server.process, server.port, [stream_of("jsonlines", tokens)] * streams, period)


def bare_measured(
    streams: int, steps_per_second: float, tokens: int, tokens_per_chunk: int, *, apart: bool
) -> Measured:
    port = free_port()
    body = {"chunks": tokens // tokens_per_chunk, "tokens_per_chunk": tokens_per_chunk}
    app = str(Path(__file__).parent / "bare_app.py")
    with started([sys.executable, app], port, PORT=str(port), STEPS_PER_SECOND=str(steps_per_second)) as process:
        run_streams(port, [post("/stream", {"chunks": 8, "tokens_per_chunk": 1})] * streams)
        period = 1 / steps_per_second if steps_per_second else None
        if apart:
            keep_apart(process)
        return measure(process, port, [post("/stream", body)] * streams, period)


def stream_of(api: str, tokens: int) -> Post:
    """The request for a stream."""
    path, body, limit, reader = APIS[api]
    if "parameters" in body:
        return post(path, {**body, "parameters": {limit: tokens}}, reader)
    return post(path, {**body, limit: tokens}, reader)


def cost(server: Server, api: str, streams: int, tokens: int, bursts: int = 1) -> float:
    """Streamed tokens per CPU-second of the server process."""
    generated = server.metric("generated_tokens_total")
    before = cpu_seconds(server.process)
    for _ in range(bursts):
        run_streams(server.port, [stream_of(api, tokens)] * streams)
    spent = max(TICK, cpu_seconds(server.process) - before)
    generated = server.metric("generated_tokens_total") - generated
    if generated != bursts * streams * tokens:
        sys.exit(f"{bursts * streams} streams of {api} had {generated:.0f} tokens, not {tokens} each")
    return generated / spent


def compare(arguments: argparse.Namespace, folder: Path) -> Table:
    """Several APIs of one server in turns, and on a server of another checkout."""
    title = "Streamed tokens per CPU-second of the server process, medians"
    table = Table("load", "streams", "API", "tok per CPU-s", "ratio", "ratios", title=title)
    for streams in arguments.streams:
        for load, steps, rate in (
            ("saturated", 0.0, 100_000),
            ("paced", arguments.offered[0] / streams, arguments.offered[0]),
        ):
            if arguments.tokens is None:
                tokens, bursts = max(16, int(arguments.seconds * rate / streams)), 1
            elif steps:
                continue
            else:
                tokens, bursts = arguments.tokens, max(1, int(arguments.seconds * 2_000 / streams))
            script, options = sized_for(streams, steps)
            model = scripted_model(folder / f"{load}-{streams}", script, **options)
            with ExitStack() as stack:
                now = stack.enter_context(serving(model, folder))
                contestants = [(api, now, api) for api in arguments.api]
                if arguments.before:
                    code = {"PYTHONPATH": arguments.before, "PYTHONSAFEPATH": "1"}
                    before = stack.enter_context(serving(model, folder, **code))
                    contestants += [(f"{api}, before", before, api) for api in arguments.api]
                found: dict[str, list[float]] = {name: [] for name, _, _ in contestants}
                for _, server, api in contestants:
                    cost(server, api, streams, 8)
                for _ in range(arguments.rounds):
                    for name, server, api in contestants:
                        found[name].append(cost(server, api, streams, tokens, bursts))
                    contestants.reverse()
            for name, costs in found.items():
                first = found[name.removesuffix(", before") if name not in arguments.api else arguments.api[0]]
                table.add_row(load, str(streams), name, f"{statistics.median(costs):,.0f}", *compared(costs, first))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--seconds", type=float, default=10.0, help="roughly, per run")
    parser.add_argument(
        "--offered", type=float, nargs="+", default=[28_000.0], help="tokens per second of the paced runs"
    )
    parser.add_argument("--executor", choices=["scripted", "tensorrt_llm"], default="scripted")
    parser.add_argument("--api", choices=APIS, nargs="+", help="compare these, in turns")
    parser.add_argument("--rounds", type=int, default=5, help="of each API")
    parser.add_argument("--tokens", type=int, help="with --api: of each stream, in saturated bursts")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="write the rows (JSON) and pictures there")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="measure nothing: show the rows of an earlier --svg")
    parser.add_argument("--apart", action="store_true", help="a core for the server, the others for the rest")
    parser.add_argument("--before", help="another checkout, to compare each API with")
    arguments = parser.parse_args()
    if arguments.tokens is not None and (arguments.tokens < 1 or not arguments.api):
        parser.error("--tokens needs --api, and a number from 1 on")
    if arguments.apart and len(CORES) == 1:
        parser.error("--apart needs two cores")
    if arguments.api:
        with tempfile.TemporaryDirectory() as folder:
            Console(width=140).print(compare(arguments, Path(folder)))
        return
    if arguments.rows is not None:
        written = json.loads(arguments.rows.read_text())
        rows = [(load, streams, server, Measured(**measured)) for load, streams, server, measured in written]
    else:
        with tempfile.TemporaryDirectory() as folder:
            rows = list(measured_rows(arguments, Path(folder)))
    Console(width=140).print(as_table(rows))
    if arguments.svg is not None:
        draw(arguments.svg, rows)


Row = tuple[str, int, str, Measured]
"""A row of the table: load, streams, server and what was measured."""


def measured_rows(arguments: argparse.Namespace, folder: Path) -> Iterator[Row]:
    apart = arguments.apart
    for streams in arguments.streams:
        for offered in arguments.offered:
            steps = offered / streams
            tokens = max(16, int(arguments.seconds * steps))
            load = f"{offered:,.0f} tok/s"
            yield load, streams, OURS, ours_measured(folder, arguments.executor, streams, steps, tokens, apart=apart)
            yield load, streams, BARE, bare_measured(streams, steps, tokens, 1, apart=apart)
        if arguments.executor == "scripted":
            tokens = max(16, int(arguments.seconds * 100_000 / streams))
            saturated = ours_measured(folder, "scripted", streams, 0, tokens, apart=apart)
            yield "saturated", streams, OURS, saturated
            chunk = max(1, round(saturated.tokens_per_chunk))
            yield "saturated", streams, BARE, bare_measured(streams, 0, tokens, chunk, apart=apart)


def as_table(rows: list[Row]) -> Table:
    table = Table(title="Streamed tokens per CPU-second of the server process")
    names = ("tok per CPU-s", "tok/s", "CPU-s per s", "engine CPU-s per s", "tok per chunk", "added ITL p99")
    for column in ("load", "streams", "server", *names):
        table.add_column(column, justify="left" if column in ("load", "server") else "right")
    for load, streams, server, m in rows:
        latency = "" if m.latency is None else f"{m.latency * 1000:.1f} ms"
        cells = (f"{m.tokens_per_cpu_second:,.0f}", f"{m.tokens_per_second:,.0f}", f"{m.cpu_share:.2f}")
        host = f"{m.host_share:.2f}" if m.host_share else ""
        table.add_row(load, str(streams), server, *cells, host, f"{m.tokens_per_chunk:.1f}", latency)
    return table


def draw(folder: Path, rows: list[Row]) -> None:
    """Write the rows and pictures of them: what the server costs by throughput, and what it adds to latencies."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [(load, streams, server, asdict(measured)) for load, streams, server, measured in rows]
    (folder / "ceiling.json").write_text(json.dumps(written, indent=1) + "\n")
    costs: dict[str, list[tuple[float, float]]] = {}
    latencies: dict[str, list[tuple[float, float]]] = {}
    for _, streams, server, m in rows:
        costs.setdefault(f"{server}, {streams} streams", []).append((m.tokens_per_second, m.cpu_share))
        if m.latency is not None:
            latencies.setdefault(f"{server}, {streams} streams", []).append((m.tokens_per_second, 1000 * m.latency))
    pictures = {
        "ceiling-cost": ("CPU-seconds per second of the server process", "CPU-s per s", costs),
        "ceiling-latency": ("Added to the p99 of the time between two tokens", "ms", latencies),
    }
    for name, (title, y, lines) in pictures.items():
        if any(len(points) > 1 for points in lines.values()):
            drawn = [Line(line, sorted(points), [""] * len(points)) for line, points in lines.items()]
            chart = Chart(title, "tokens per second", y, drawn, log="x")
            (folder / f"{name}.svg").write_text(picture([chart]) + "\n")


if __name__ == "__main__":
    main()
