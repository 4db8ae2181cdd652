"""What the prefix cache is worth on the bundled model, and what keeping clients apart in it costs.

    python -m benchmarks.prefix_cache [MODEL] [--streams 64] [--tokens 64] [--runs 3]

Bursts of streams whose prompts, 8 of 211 tokens, have been sent before: with the cache off, on, and on with a group
(`cache_salt`) for each prompt. Then the time to the first token of a chat's two turns, alone: the second begins with
the first, once in its own group and once in another one. A server for the cache and one without run side by side, and
take turns, so that the ratios are of one machine in one run.
"""

from __future__ import annotations

import argparse
import random
import statistics
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile, post, run_streams, time_to_first_token, wall_seconds
from benchmarks.servers import Server, of_the_shell, serving
from djl_trtllm.bench.client import EventReader

MODEL = Path(__file__).parents[1] / "serving" / "models" / "tiny-stories"
PROMPTS, PROMPT_TOKENS = 8, 211
TURN_TOKENS = 900
OFF, ON, APART = "off", "on", "on, a group for each prompt"


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of the bundled model that are no special ones."""
    chosen = random.Random(seed)
    return [chosen.randrange(300, 2000) for _ in range(tokens)]


def burst(server: Server, streams: int, tokens: int, *, apart: bool = False) -> tuple[float, float]:
    """Tokens per second, and the 99th percentile of the times to the first token, of prompts that were sent before."""
    requests = []
    for number in range(streams):
        body = {"prompt": prompt(number % PROMPTS, PROMPT_TOKENS), "max_tokens": tokens, "temperature": 0}
        body |= {"stream": True, "ignore_eos": True} | ({"cache_salt": str(number % PROMPTS)} if apart else {})
        requests.append(post("/v1/completions", body, EventReader))
    run_streams(server.port, requests[:PROMPTS])
    results = run_streams(server.port, requests)
    generated = sum(result.tokens for result in results)
    return generated / wall_seconds(results), percentile([time_to_first_token(result) for result in results], 0.99)


def first_token(server: Server, ids: list[int], group: str) -> float:
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "stream": True, "cache_salt": group}
    (result,) = run_streams(server.port, [post("/v1/completions", body, EventReader)])
    return time_to_first_token(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    places = {"OPTION_MAX_ROLLING_BATCH_SIZE": str(given.streams)}
    bursts: dict[str, list[tuple[float, float]]] = {OFF: [], ON: [], APART: []}
    turns: list[tuple[float, float, float]] = []
    with ExitStack() as stack:
        off = stack.enter_context(serving(given.model, **of_the_shell(**places, OPTION_ENABLE_KV_CACHE_REUSE="false")))
        on = stack.enter_context(serving(given.model, **of_the_shell(**places)))
        for run in range(given.runs):
            bursts[OFF].append(burst(off, given.streams, given.tokens))
            bursts[ON].append(burst(on, given.streams, given.tokens))
            bursts[APART].append(burst(on, given.streams, given.tokens, apart=True))
            first = prompt(100 + run, TURN_TOKENS)
            second = [*first, *prompt(200 + run, 50)]
            turns.append((first_token(on, first, "a"), first_token(on, second, "a"), first_token(on, second, "b")))
    table = Table("prefix cache", "tok/s", "ratio", "TTFT p99 ms", title=f"{given.streams} streams, medians")
    for name, measured in bursts.items():
        speeds, waits = zip(*measured, strict=True)
        ratio = statistics.median(one[0] / other[0] for one, other in zip(measured, bursts[OFF], strict=True))
        wait = statistics.median(waits) * 1e3
        table.add_row(name, f"{statistics.median(speeds):,.0f}", f"{ratio:.2f}", f"{wait:,.0f}")
    Console().print(table)
    one, two, other = (statistics.median(column) * 1e3 for column in zip(*turns, strict=True))
    print(f"time to the first token: first turn {one:.0f} ms, second {two:.0f} ms, in another group {other:.0f} ms")


if __name__ == "__main__":
    main()
