"""What the live page costs the server, while streams run.

    python -m benchmarks.monitor [--streams 256] [--steps 20] [--pages 1 4] [--rounds 8] [--seconds 5]

The scripted executor gives every stream `--steps` tokens per second. Windows of `--seconds` without and with open pages
take turns, and the CPU time of the server process in each is compared with that in the window before. The last column
is exact where the others are noisy: the time that one snapshot takes, four times a second, measured alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import orjson
from rich.console import Console
from rich.table import Table

from benchmarks.load import post, streaming
from benchmarks.servers import Server, cpu_seconds, serving
from djl_trtllm.batching.statistics import RequestRecord
from djl_trtllm.request import RequestOrigin
from djl_trtllm.server.monitor import PERIOD, snapshot
from djl_trtllm.service.lifecycle import Registry, ServedModel
from tests.support.models import PROMPT, scripted_model

_REPEATS = 500


def alone(streams: int) -> float:
    """Share of a core that snapshots of N live requests and 512 ended ones take."""
    model, registry = ServedModel("story", "/story"), Registry()
    registry.add(model)
    now = time.monotonic()
    for number in range(512 + streams):
        record = RequestRecord(
            RequestOrigin(f"{number:036d}"), now, 30, 1, number=number, started=now, first_token_at=now
        )
        if number < 512:
            record.ended = now
            model.statistics.ended.append(record)
        else:
            model.statistics.live[number] = record
    began = time.process_time()
    for _ in range(_REPEATS):
        orjson.dumps(snapshot(registry, None, now, now + 60))
    return (time.process_time() - began) / _REPEATS / PERIOD


def watch(server: Server, over: threading.Event, stack: ExitStack) -> None:
    """Open a page, and read what it gets until `over`."""

    def read() -> None:
        with httpx.stream("GET", f"{server.url}/monitor/events", timeout=60, trust_env=False) as stream:
            for _ in stream.iter_lines():
                if over.is_set():
                    return

    thread = threading.Thread(target=read)
    thread.start()
    stack.callback(thread.join)


def cpu_share(server: Server, seconds: float, pages: int) -> float:
    """CPU seconds per second of the server process, with this number of open pages."""
    over = threading.Event()
    with ExitStack() as stack:
        for _ in range(pages):
            watch(server, over, stack)
        stack.callback(over.set)
        time.sleep(0.5)
        cpu, began = cpu_seconds(server.process), time.perf_counter()
        time.sleep(seconds)
        return (cpu_seconds(server.process) - cpu) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=float, default=20, help="tokens per second of each stream")
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5, help="of a window")
    arguments = parser.parse_args()
    windows = 2 * arguments.rounds * len(arguments.pages)
    tokens = int(arguments.steps * (arguments.seconds + 1.5) * (windows + 2))
    title = f"CPU of the server process, {arguments.streams} streams of {arguments.steps:g} tokens per second"
    table = Table("pages", "without", "with", "added, median", "snapshots alone", title=title)
    share = alone(arguments.streams)
    with tempfile.TemporaryDirectory() as folder:
        limit = {"option.max_rolling_batch_size": arguments.streams}
        model = scripted_model(Path(folder) / "model", {"steps_per_second": arguments.steps}, **limit)
        request = post("/invocations", {"inputs": PROMPT, "parameters": {"max_new_tokens": tokens}, "stream": True})
        with (
            serving(model, SERVING_MONITOR="true") as server,
            streaming(server, request, arguments.streams, tokens / arguments.steps) as thread,
        ):
            for pages in arguments.pages:
                found = [
                    (cpu_share(server, arguments.seconds, 0), cpu_share(server, arguments.seconds, pages))
                    for _ in range(arguments.rounds)
                ]
                without, with_pages = (statistics.median(each) for each in zip(*found, strict=True))
                added = statistics.median(later - before for before, later in found)
                cells = (f"{without:.1%}", f"{with_pages:.1%}", f"{added:+.2%}", f"{share:.2%}")
                table.add_row(str(pages), *cells)
            thread.join()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
