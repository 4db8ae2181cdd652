"""What the engine process costs beside TensorRT-LLM: its CPU time per token, beside a loop that only reads results.

    python -m benchmarks.engine_process [--backends tensorrt pytorch] [--streams 256] [--offered 28000] [--rounds 5]
                                        [--interval 1] [--before CHECKOUT] [--together]

TensorRT-LLM is the tests' fake, whose objects do per response in the engine process what the real ones do
(tests/fakes); its workers are other processes and do not count. `read only` is the same process with a loop that takes
TensorRT-LLM's results and sends no tokens (benchmarks/reading_executor.py): what is above it is ours. With `--before`
the engine process of another checkout runs in turns with this one's. Figures are medians over the rounds, a ratio is
the median of the ratios within them, to this checkout.

With `--together` two engine processes run, first one after the other and then at the same time: if they share nothing
that serialises, each needs the same CPU time and, on a machine with cores for both and their workers, the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
import uvloop
from rich.console import Console
from rich.table import Table

from benchmarks.load import compared
from benchmarks.servers import cpu_seconds
from djl_trtllm.executor.client import ExecutorClient
from djl_trtllm.executor.protocol import Start, Step, Submit
from djl_trtllm.request import Sampling
from tests.fakes.installation import fake_tensorrt_llm
from tests.support import models
from tests.support.models import scripted_model

PROMPT = list(range(10, 110))
LONG = 2_000_000
HERE = Path(__file__).parent.parent
OURS, BEFORE, READ_ONLY = "this checkout", "before", "read only"
READING = "benchmarks.reading_executor:ReadingExecutor"


class Cost(NamedTuple):
    """The cost of one round. `microseconds` are CPU time per token."""

    microseconds: float
    seconds: float


class EngineProcess:
    """An engine process with requests that all begin at once."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._ended = asyncio.Event()
        self._client = ExecutorClient(
            on_steps=self._take, on_death=lambda error: sys.exit(str(error)), busy=lambda: False, hang_timeout=600.0
        )

    async def start(self, executor: str, backend: str, model: Path, streams: int, interval: int) -> None:
        limits: dict[str, object] = {"max_batch_size": streams, "max_seq_len": LONG}
        if backend == "tensorrt":
            limits = {"build_config": {"class": "BuildConfig", **limits}}
        else:
            limits |= {"enable_iter_perf_stats": True, "stream_interval": interval}
        options = {
            "backend": backend,
            "model": str(model),
            "tokenizer": str(model),
            "arguments": limits,
            "max_sequences": streams,
            "max_seq_len": LONG,
            "iteration_stats": True,
        }
        await self._client.start(Start(executor, options), 120)

    async def run(self, streams: int, tokens: int) -> Cost:
        """Run this number of requests to their end."""
        self._ended.clear()
        self._left = set(range(streams))
        process = psutil.Process(self._client.pid)
        before, began = cpu_seconds(process), time.perf_counter()
        for number in range(streams):
            self._client.submit(Submit(number, PROMPT, Sampling(tokens, ignore_eos=True)))
        await self._ended.wait()
        spent, seconds = cpu_seconds(process) - before, time.perf_counter() - began
        return Cost(spent / (streams * tokens) * 1e6, seconds)

    async def close(self) -> None:
        await self._client.close()

    def _take(self, steps: list[Step]) -> None:
        for step in steps:
            for end in step.ends:
                if end.error is not None:
                    sys.exit(f"a request failed: {end.error}")
                self._left.discard(end.request_id)
        if not self._left:
            self._ended.set()


def environment(code: Path, folder: Path, script: dict[str, float]) -> None:
    """Processes that start from now on run the code of this checkout over the fake."""
    os.environ["PYTHONPATH"] = str(code)
    os.environ |= {"PYTHONSAFEPATH": "1", **fake_tensorrt_llm(folder / "fake", script=script)}


async def started(
    folder: Path, code: Path, backend: str, arguments: argparse.Namespace, executor: str = models.TENSORRT_LLM
) -> EngineProcess:
    environment(code, folder, {"steps_per_second": arguments.offered / arguments.streams})
    process = EngineProcess()
    await process.start(executor, backend, folder / "model", arguments.streams, arguments.interval)
    return process


async def compare(folder: Path, backend: str, arguments: argparse.Namespace) -> dict[str, list[Cost]]:
    """Rounds of all contestants, in turns."""
    streams = arguments.streams
    tokens = max(16, int(arguments.seconds * arguments.offered / streams))
    processes = {
        OURS: await started(folder, HERE, backend, arguments),
        READ_ONLY: await started(folder, HERE, backend, arguments, READING),
    }
    if arguments.before:
        processes[BEFORE] = await started(folder, arguments.before.resolve(), backend, arguments)
    found: dict[str, list[Cost]] = {name: [] for name in processes}
    for process in processes.values():
        await process.run(streams, 16)
    order = list(processes)
    for _ in range(arguments.rounds):
        for name in order:
            found[name].append(await processes[name].run(streams, tokens))
        order.reverse()
    for process in processes.values():
        await process.close()
    return found


async def together(folder: Path, backend: str, arguments: argparse.Namespace) -> dict[str, list[Cost]]:
    """Two engine processes, one after the other and at the same time."""
    streams = arguments.streams
    tokens = max(16, int(arguments.seconds * arguments.offered / streams))
    processes = [await started(folder, HERE, backend, arguments) for _ in range(2)]
    found: dict[str, list[Cost]] = {OURS: [], "two at once": []}
    for process in processes:
        await process.run(streams, 16)
    for _ in range(arguments.rounds):
        found[OURS] += [await process.run(streams, tokens) for process in processes]
        found["two at once"] += await asyncio.gather(*(process.run(streams, tokens) for process in processes))
    for process in processes:
        await process.close()
    return found


def main() -> None:
    """Measure in turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=["tensorrt", "pytorch"], default=["tensorrt", "pytorch"])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--offered", type=float, default=28_000.0, help="tokens per second")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each run, roughly")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=int, default=1, help="option.stream_interval, of the PyTorch backend")
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--together", action="store_true", help="two engine processes at once")
    arguments = parser.parse_args()
    title = f"{arguments.offered:,.0f} tok/s over {arguments.streams} streams, CPU time of the engine process"
    table = Table("backend", "", "µs per token", "CPU-s per s", "seconds", "ratio", "lowest and highest", title=title)
    for backend in arguments.backends:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            scripted_model(folder / "model")
            measured = (together if arguments.together else compare)(folder, backend, arguments)
            found = uvloop.run(measured)
        for contestant, costs in found.items():
            microseconds = statistics.median(cost.microseconds for cost in costs)
            table.add_row(
                backend,
                contestant,
                f"{microseconds:.1f}",
                f"{microseconds * arguments.offered / 1e6:.2f}",
                f"{statistics.median(cost.seconds for cost in costs):.1f}",
                *compared([cost.microseconds for cost in costs], [cost.microseconds for cost in found[OURS]]),
            )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
