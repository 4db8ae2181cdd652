"""What is left of the engine's speed in `LLM.generate`: a batch of prompts, beside the raw executor in its own process.

    python -m benchmarks.offline [MODEL] [--prompts 1 16 64] [--runs 5] [--tokens 128] [--before CHECKOUT]

Both run the same compiled engine with the same options on the same prompts, in turns. `CPU` is the time of both
processes together: where the engine's threads share their cores with the program, as here, the ratio of the speeds is
made of it. The ratio is the median over the runs; with `--before`, `LLM.generate` of another checkout runs, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.servers import of_the_shell
from djl_trtllm.service.model import open_source, prepare

HERE = Path(__file__).parent
MODEL = HERE.parent / "serving" / "models" / "tiny-stories"
BEGINNINGS = (
    "tell me a story of the little red riding hood",
    "Once upon a time, in a dark wood,",
    "The wolf knocked on the door of the cottage and said",
    "Tell me a story about a fox and a bear",
)
_TOKENS = 4096
"""Seconds of a run at least: CPU time comes in ticks."""
OURS, RAW, BEFORE = "LLM.generate", "raw", "LLM.generate, before"


class Peer:
    """A process that runs the batches that come on its standard input."""

    def __init__(self, script: str, argument: str, environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / script), argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        self._read()

    def run(self, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        """Tokens per second, and microseconds of CPU time for each; batch after batch, up to `_TOKENS`."""
        assert self._process.stdin is not None
        before, seconds, done = self._cpu(), 0.0, 0
        while done < _TOKENS:
            print(json.dumps({"prompts": prompts, "tokens": tokens}), file=self._process.stdin, flush=True)
            answer = json.loads(self._read())
            seconds, done = seconds + answer["seconds"], done + answer["tokens"]
        return done / seconds, (self._cpu() - before) / done * 1e6

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _cpu(self) -> float:
        process = psutil.Process(self._process.pid)
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a process ended")
        return line


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", default=MODEL)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--before", type=Path, help="another checkout")
    arguments = parser.parse_args()
    environ = of_the_shell(OPTION_MAX_ROLLING_BATCH_SIZE=str(max(16, *arguments.prompts)))
    model = prepare(open_source(arguments.model, environ))
    here = {**environ, "PYTHONPATH": str(HERE.parent), "PYTHONSAFEPATH": "1"}
    peers = {
        OURS: Peer("offline_batches.py", str(arguments.model), here),
        RAW: Peer("raw_openvino.py", json.dumps(model.start.options), here),
    }
    if arguments.before:
        code = str(arguments.before.resolve())
        peers[BEFORE] = Peer("offline_batches.py", str(arguments.model), {**here, "PYTHONPATH": code})
    title = f"{arguments.model.name}, {arguments.tokens} tokens for each prompt, {arguments.runs} runs"
    table = Table(
        "prompts", "", "tok/s", "of the raw engine", "spread", "CPU µs per token", "of the raw engine", title=title
    )
    try:
        for peer in peers.values():
            peer.run([model.tokenizer.encode(BEGINNINGS[0])] * max(arguments.prompts), arguments.tokens)
        for count in arguments.prompts:
            prompts = [model.tokenizer.encode(BEGINNINGS[number % len(BEGINNINGS)]) for number in range(count)]
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
            order = list(peers)
            for _ in range(arguments.runs):
                for name in order:
                    found[name].append(peers[name].run(prompts, arguments.tokens))
                order.reverse()
            for name, runs in found.items():
                speeds = [one[0] / raw[0] for one, raw in zip(runs, found[RAW], strict=True)]
                costs = [one[1] / raw[1] for one, raw in zip(runs, found[RAW], strict=True)]
                table.add_row(
                    str(count),
                    name,
                    f"{statistics.median(run[0] for run in runs):,.0f}",
                    f"{statistics.median(speeds):.2f}",
                    f"{min(speeds):.2f}-{max(speeds):.2f}",
                    f"{statistics.median(run[1] for run in runs):.0f}",
                    f"{statistics.median(costs):.2f}",
                )
    finally:
        for peer in peers.values():
            peer.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
