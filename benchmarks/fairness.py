"""The first token of a light client, alone and beside clients that flood the server.

    python -m benchmarks.fairness [--engine scripted openvino] [--requests 200] [--policy fair fcfs]

The light client sends a request of 5 tokens, waits for its end, and pauses. A flood is a client whose requests are
always as many as its row says, from a process of its own; it begins before the light client's first request. `alone` is
measured before each flood and after the last.

What fair shares decide is how long a request waits for a place (`queue`, from the server's log). The rest of the time
to the first token is iterations of the engine, which take longer the more sequences run: `iteration` is the time
between two tokens of the light client (medians), and `in iterations` is the ratio of the p99s, each in iterations of
its phase. `throughput` is what one client that fills the batch gets, in output tokens per second, while places are kept
for another client that has just been there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.load import percentile
from benchmarks.servers import Server, of_the_shell, serving
from tests.support.models import TINY_STORIES, scripted_model

_PROMPT = "Once upon a time there was a wolf in the wood"
_HEADER = "x-client"
_SCRIPT = {"steps_per_second": 100, "max_sequences": 32, "prefill_seconds": 0.002}
_LIGHT, _TOKENS = "light", 5
_QUEUED = re.compile(r"queue_seconds=([0-9.]+)")
_COLUMNS = (
    *("policy", "flood", "alone p50", "p99", "beside p50", "p99", "queue p50", "p99", "iteration alone", "beside"),
    *("p99 ratio", "in iterations", "throughput"),
)
_WARM_SECONDS = 2.0
_THROUGHPUT_SECONDS = 8.0

Flood = tuple[int, dict[str, Any]]
"""The flood: requests at once, and their parameters."""

FLOODS: dict[str, Flood] = {
    "60 requests of n=16": (60, {"n": 16, "do_sample": True, "max_new_tokens": 200}),
    "200 long outputs": (200, {"max_new_tokens": 500}),
    "200 short outputs": (200, {"max_new_tokens": 8}),
    "60 with a seed, n=16": (60, {"n": 16, "do_sample": True, "seed": 7, "max_new_tokens": 200}),
}


def _request(connection: http.client.HTTPConnection, client: str, parameters: dict[str, Any], stream: bool) -> Any:
    body = json.dumps({"inputs": _PROMPT, "parameters": {**parameters, "ignore_eos": True}, "stream": stream})
    headers = {"Content-Type": "application/json", _HEADER: client, "x-request-id": client}
    connection.request("POST", "/invocations", body, headers)
    return connection.getresponse()


def _repeat(port: int, client: str, parameters: dict[str, Any], ended: Event, tokens: list[int]) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    while not ended.is_set():
        try:
            response = _request(connection, client, parameters, False)
            response.read()
            if response.status == 200 and not ended.is_set():
                tokens.append(int(parameters["max_new_tokens"]) * int(parameters.get("n", 1)))
            elif response.status != 200:
                time.sleep(0.05)
        except (OSError, http.client.HTTPException):
            connection.close()


def _flood(port: int, flood: Flood, ended: Event, total: Any) -> None:
    """Send as many requests as the flood has, all the time, until `ended` is set."""
    count, parameters = flood
    tokens: list[int] = []
    for _ in range(count):
        threading.Thread(target=_repeat, args=(port, "flood", parameters, ended, tokens), daemon=True).start()
    ended.wait()
    total.value = sum(tokens)


@contextmanager
def flooded(port: int, flood: Flood, total: Any = None) -> Iterator[None]:
    context = multiprocessing.get_context("spawn")
    ended, total = context.Event(), total or context.Value("q", 0)
    process = context.Process(target=_flood, args=(port, flood, ended, total), daemon=True)
    process.start()
    try:
        time.sleep(_WARM_SECONDS)
        yield
    finally:
        ended.set()
        process.join()


class Light:
    """Requests of the light client, in seconds: to the first token, waiting for a place, and between two tokens."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.queue: list[float] = []
        self.between: list[float] = []

    def send(self, server: Server, requests: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        pauses = random.Random(1)
        for _ in range(requests):
            begun = time.perf_counter()
            response = _request(connection, _LIGHT, {"max_new_tokens": _TOKENS}, True)
            if response.status != 200:
                raise SystemExit(f"the light client got {response.status}: {response.read()!r}")
            response.read1()
            first = time.perf_counter()
            response.read()
            self.first.append(first - begun)
            self.between.append((time.perf_counter() - first) / (_TOKENS - 1))
            time.sleep(pauses.uniform(0.0, 0.05))
        connection.close()
        self.queue += _queued(server)[-requests:]

    @property
    def iterations(self) -> float:
        """The 99th percentile of the time to the first token, in iterations of the engine."""
        return percentile(self.first, 0.99) / percentile(self.between, 0.5)


def _queued(server: Server) -> list[float]:
    """Seconds in the queue of the light client's requests, from the server's log."""
    lines = [line for line in server.log if f"[{_LIGHT}]" in line]
    return [float(found[1]) for line in lines if (found := _QUEUED.search(line))]


def throughput(port: int) -> float:
    """Output tokens per second of one client that is alone."""
    total = multiprocessing.get_context("spawn").Value("q", 0)
    with flooded(port, (128, {"max_new_tokens": 100}), total):
        time.sleep(_THROUGHPUT_SECONDS)
    return float(total.value) / (_WARM_SECONDS + _THROUGHPUT_SECONDS)


def settle(server: Server) -> None:
    """Wait until what the flood left behind is cancelled."""
    while not server.idle():
        time.sleep(0.2)


def measure(open_server: Callable[[str], Any], policy: str, requests: int, table: Table) -> None:
    with open_server(policy) as server:
        # The harness has sent requests as another client just before, so that a share of the places is kept free.
        speed = throughput(server.port)
        settle(server)
        Light().send(server, 20)
        alone = Light()
        alone.send(server, requests)
        for name, flood in FLOODS.items():
            beside = Light()
            with flooded(server.port, flood):
                beside.send(server, requests if policy == "fair" else min(requests, 20))
            settle(server)
            alone.send(server, requests // 4)
            compared = [
                *(_milliseconds(each.first, share) for each in (alone, beside) for share in (0.5, 0.99)),
                *(_milliseconds(beside.queue, share) for share in (0.5, 0.99)),
                *(_milliseconds(each.between, 0.5) for each in (alone, beside)),
                f"{percentile(beside.first, 0.99) / percentile(alone.first, 0.99):,.2f}",
                f"{beside.iterations / alone.iterations:,.2f}",
            ]
            table.add_row(policy, name, *compared, f"{speed:,.0f}")


def _milliseconds(seconds: list[float], share: float) -> str:
    return f"{percentile(seconds, share) * 1000:,.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=["scripted", "openvino"], default=["scripted", "openvino"])
    parser.add_argument("--policy", nargs="+", choices=["fair", "fcfs"], default=["fair", "fcfs"])
    parser.add_argument("--requests", type=int, default=200, help="of the light client, beside each flood")
    arguments = parser.parse_args()
    for engine in arguments.engine:
        table = Table(title=f"{engine}: milliseconds to the first token of a light client")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        with tempfile.TemporaryDirectory() as folder:
            model = TINY_STORIES if engine == "openvino" else scripted_model(Path(folder) / "scripted", _SCRIPT)

            def open_server(policy: str, model: Path = model) -> Any:
                options = {"SERVING_SCHEDULING_POLICY": policy, "SERVING_CLIENT_HEADER": _HEADER}
                return serving(
                    model,
                    None,
                    **of_the_shell(**options, OPTION_MAX_ROLLING_BATCH_SIZE="32"),
                )

            for policy in arguments.policy:
                measure(open_server, policy, arguments.requests, table)
        Console(width=170).print(table)


if __name__ == "__main__":
    main()
