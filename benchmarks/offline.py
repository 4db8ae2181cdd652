"""What is left of the engine's speed in `LLM.generate`: a batch of prompts, beside the raw executor in its own process.

    python -m benchmarks.offline [MODEL] [--prompts 1 16 64] [--runs 5] [--tokens 128] [--before CHECKOUT]

Both run the same compiled engine with the same options on the same prompts, in turns. `CPU` is the time of both
processes together: where the engine's threads share their cores with the program, as here, the ratio of the speeds is
made of it. The ratio is the median over the runs; with `--before`, `LLM.generate` of another checkout runs, too.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.batches import BEGINNINGS, MODEL, Peer
from benchmarks.load import compared
from benchmarks.servers import cpu_seconds, of_the_shell
from djl_trtllm.service.model import open_source, prepare

HERE = Path(__file__).parents[1]
_TOKENS = 4096
"""Seconds of a run at least: CPU time comes in ticks."""
OURS, RAW, BEFORE = "LLM.generate", "raw", "LLM.generate, before"


def measured(peer: Peer, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Tokens per second, and microseconds of CPU time for each; batch after batch, up to `_TOKENS`."""
    before, seconds, done = _cpu(peer), 0.0, 0.0
    while done < _TOKENS:
        answer = peer.run(prompts, tokens, logprobs=False)
        seconds, done = seconds + answer["seconds"], done + answer["tokens"]
    return done / seconds, (_cpu(peer) - before) / done * 1e6


def _cpu(peer: Peer) -> float:
    return sum(map(cpu_seconds, (peer.process, *peer.process.children(recursive=True))))


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
    here = {**environ, "PYTHONPATH": str(HERE), "PYTHONSAFEPATH": "1"}
    peers = {
        OURS: Peer("llm", str(arguments.model), here),
        RAW: Peer("raw", json.dumps(model.start.options), here),
    }
    if arguments.before:
        code = str(arguments.before.resolve())
        peers[BEFORE] = Peer("llm", str(arguments.model), {**here, "PYTHONPATH": code})
    title = f"{arguments.model.name}, {arguments.tokens} tokens for each prompt, {arguments.runs} runs"
    table = Table(
        "prompts", "", "tok/s", "of the raw engine", "spread", "CPU µs per token", "of the raw engine", title=title
    )
    try:
        for peer in peers.values():
            measured(peer, [model.tokenizer.encode(BEGINNINGS[0])] * max(arguments.prompts), arguments.tokens)
        for count in arguments.prompts:
            prompts = [model.tokenizer.encode(BEGINNINGS[number % len(BEGINNINGS)]) for number in range(count)]
            found: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
            order = list(peers)
            for _ in range(arguments.runs):
                for name in order:
                    found[name].append(measured(peers[name], prompts, arguments.tokens))
                order.reverse()
            raw_speeds, raw_costs = zip(*found[RAW], strict=True)
            for name, runs in found.items():
                speeds, costs = zip(*runs, strict=True)
                cells = (f"{statistics.median(speeds):,.0f}", *compared(speeds, raw_speeds))
                cost = (f"{statistics.median(costs):.0f}", compared(costs, raw_costs)[0])
                table.add_row(str(count), name, *cells, *cost)
    finally:
        for peer in peers.values():
            peer.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
