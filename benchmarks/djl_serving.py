"""Inside DJL Serving: our handlers beside DJL's own base class and helpers, and beside `djl-trtllm serve`.

    python -m benchmarks.djl_serving [--streams 16 64 256] [--tokens 128] [--steps-per-second 400] [--rounds 4]
                                     [--checkout DIR]

The same scripted tokens everywhere: one per stream and step. The handlers run under the real Java engine of DJL (Maven
Central), whose clients are threads of the same JVM; `djl-trtllm serve` is measured over HTTP by a client in Python. A
stream is a client that sends `--rounds` requests one after the other. `added latency` is how much longer an answer
took, per token, than the engine's step. With a checkout of djl-serving's source its HTTP front end is built
(scripts/djl-serving), and everything is measured through it as well, over HTTP with the same client.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile, post, run_streams, time_to_first_token, wall_seconds
from benchmarks.servers import free_port, serving, started
from tests.integration.djl.engines import JavaEngine, djl_model

HERE = Path(__file__).parent
PROMPT = "the little red riding hood went into the dark wood"


@dataclass
class Measured:
    """Tokens per second, and seconds."""

    tokens_per_second: float
    ttft_p50: float
    ttft_p99: float


def our_model(root: Path, mode: str, steps: float, streams: int) -> Path:
    """The scripted executor behind one of our handlers."""
    script = {"steps_per_second": steps, "max_sequences": streams}
    directory = root / f"ours-{mode}"
    return djl_model(directory, mode, script, **{"option.max_rolling_batch_size": streams})


def peer_model(root: Path, mode: str, steps: float, streams: int) -> Path:
    """DJL's own way with the same tokens."""
    directory = root / f"djl-{mode}"
    shutil.copytree(HERE / "djl_peers" / mode, directory)
    lines = {
        "engine": "Python",
        "minWorkers": 1,
        "maxWorkers": 1,
        "option.model_id": "none",
        "option.max_rolling_batch_size": streams,
        "option.rolling_batch": "auto" if mode == "rolling" else "disable",
        "option.async_mode": str(mode == "async").lower(),
        "option.steps_per_second": steps,
    }
    (directory / "serving.properties").write_text("".join(f"{key}={value}\n" for key, value in lines.items()))
    return directory


def over_http(port: int, path: str, body: dict[str, object], streams: int, rounds: int) -> Measured:
    """Streams of a server over HTTP, round after round."""
    run_streams(port, [post(path, body)] * streams)
    seconds = tokens = 0.0
    firsts: list[float] = []
    for _ in range(rounds):
        results = run_streams(port, [post(path, body)] * streams)
        seconds += wall_seconds(results)
        tokens += sum(result.tokens for result in results)
        firsts += map(time_to_first_token, results)
    return Measured(tokens / seconds, percentile(firsts, 0.5), percentile(firsts, 0.99))


def in_java(model: Path, body: bytes, streams: list[int], rounds: int) -> dict[int, Measured]:
    """Streams of a model under DJL's Java engine."""
    measured = {}
    with JavaEngine(model) as engine:
        for count in streams:
            engine.measure(body, count, 1)  # the JVM compiles what it runs often
            got = engine.measure(body, count, rounds)
            if got["failed"]:
                sys.exit(f"{model.name}: {got['failed']} of {count * rounds} requests failed")
            measured[count] = Measured(got["tokens"] / got["seconds"], got["ttft_p50"], got["ttft_p99"])
    return measured


def front_end(arguments: argparse.Namespace, model: Path, request: dict[str, object]) -> dict[int, Measured]:
    """Streams through DJL Serving's HTTP front end."""
    port = free_port()
    command = [str(HERE.parent / "scripts" / "djl-serving"), str(arguments.checkout), str(model), "--port", str(port)]
    environ = {"PYTHON_EXECUTABLE": sys.executable, "DJL_CACHE_DIR": str(model.parent / "djl-cache")}
    with started(command, port, **environ):
        return {count: over_http(port, "/invocations", request, count, arguments.rounds) for count in arguments.streams}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--tokens", type=int, default=128, help="per request")
    parser.add_argument("--steps-per-second", type=float, default=400.0, help="of the scripted engine; 0: at once")
    parser.add_argument("--rounds", type=int, default=4, help="requests of each stream")
    parser.add_argument("--checkout", type=Path, help="a checkout of djl-serving, for its HTTP front end")
    arguments = parser.parse_args()
    request = {"inputs": PROMPT, "parameters": {"max_new_tokens": arguments.tokens}, "stream": True}
    body, steps, most = json.dumps(request).encode(), arguments.steps_per_second, max(arguments.streams)
    results: dict[str, dict[int, Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        models = {
            "DJL's base class, rolling batch": peer_model(root, "rolling", steps, most),
            "djl_trtllm.handler, rolling batch": our_model(root, "rolling", steps, most),
            "DJL's helpers, async": peer_model(root, "async", steps, most),
            "djl_trtllm.async_handler": our_model(root, "async", steps, most),
        }
        for name, model in models.items():
            results[name] = in_java(model, body, arguments.streams, arguments.rounds)
            if arguments.checkout is not None:
                results[f"{name}, HTTP"] = front_end(arguments, model, request)
        with serving(models["djl_trtllm.async_handler"]) as server:
            results["djl-trtllm serve, HTTP"] = {
                count: over_http(server.port, "/invocations", request, count, arguments.rounds)
                for count in arguments.streams
            }
    table = Table(title=f"{arguments.tokens} tokens per request, {steps:g} steps per second")
    for column in ("streams", "server", "offered tok/s", "tok/s", "TTFT p50", "TTFT p99", "added latency per token"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for count in arguments.streams:
        for name, measured in results.items():
            m = measured[count]
            added = count / m.tokens_per_second - (1 / steps if steps else 0.0)
            cells = (f"{m.ttft_p50 * 1000:.0f} ms", f"{m.ttft_p99 * 1000:.0f} ms", f"{added * 1000:.2f} ms")
            offered = f"{count * steps:,.0f}" if steps else "all"
            table.add_row(str(count), name, offered, f"{m.tokens_per_second:,.0f}", *cells)
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
