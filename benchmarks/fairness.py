"""The first token of a light client, alone and beside clients that flood the server.

    python -m benchmarks.fairness [--engine scripted openvino] [--requests 200] [--policy fair fcfs]

The light client sends a request of 5 tokens, waits for its end, and pauses. A flood is a client whose requests are
always as many as its row says, from a process of its own; it begins before the light client's first request. `alone` is
measured before each flood and after the last. `throughput` is what one client that fills the batch gets, in output
tokens per second, while places are kept for another client that has just been there.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
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
_WARM_SECONDS = 2.0
_THROUGHPUT_SECONDS = 8.0

Flood = tuple[int, dict[str, Any]]
"""Requests at once, and their parameters."""

FLOODS: dict[str, Flood] = {
    "60 requests of n=16": (60, {"n": 16, "do_sample": True, "max_new_tokens": 200}),
    "200 long outputs": (200, {"max_new_tokens": 500}),
    "200 short outputs": (200, {"max_new_tokens": 8}),
    "60 with a seed, n=16": (60, {"n": 16, "do_sample": True, "seed": 7, "max_new_tokens": 200}),
}


def _request(connection: http.client.HTTPConnection, client: str, parameters: dict[str, Any], stream: bool) -> Any:
    body = json.dumps({"inputs": _PROMPT, "parameters": {**parameters, "ignore_eos": True}, "stream": stream})
    headers = {"Content-Type": "application/json", _HEADER: client}
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


def first_tokens(port: int, requests: int) -> list[float]:
    """Seconds to the first token of each request of the light client."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    pauses = random.Random(1)
    found = []
    for _ in range(requests):
        begun = time.perf_counter()
        response = _request(connection, "light", {"max_new_tokens": 5}, True)
        if response.status != 200:
            raise SystemExit(f"the light client got {response.status}: {response.read()!r}")
        response.read1()
        found.append(time.perf_counter() - begun)
        response.read()
        time.sleep(pauses.uniform(0.0, 0.05))
    connection.close()
    return found


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
        first_tokens(server.port, 20)
        alone = first_tokens(server.port, requests)
        for name, flood in FLOODS.items():
            with flooded(server.port, flood):
                beside = first_tokens(server.port, requests if policy == "fair" else min(requests, 20))
            settle(server)
            alone += first_tokens(server.port, requests // 4)
            ratio = percentile(beside, 0.99) / percentile(alone, 0.99)
            shown = [f"{percentile(each, share) * 1000:,.1f}" for each in (alone, beside) for share in (0.5, 0.99)]
            table.add_row(policy, name, *shown, f"{ratio:,.2f}", f"{speed:,.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", choices=["scripted", "openvino"], default=["scripted", "openvino"])
    parser.add_argument("--policy", nargs="+", choices=["fair", "fcfs"], default=["fair", "fcfs"])
    parser.add_argument("--requests", type=int, default=200, help="of the light client, beside each flood")
    arguments = parser.parse_args()
    for engine in arguments.engine:
        table = Table(title=f"{engine}: milliseconds to the first token of a light client")
        columns = ("policy", "flood", "alone p50", "alone p99", "beside p50", "beside p99", "p99 ratio", "throughput")
        for column in columns:
            table.add_column(column, justify="right")
        with tempfile.TemporaryDirectory() as folder:
            model = TINY_STORIES if engine == "openvino" else scripted_model(Path(folder) / "scripted", _SCRIPT)

            def open_server(policy: str, model: Path = model) -> Any:
                options = {"SERVING_SCHEDULING_POLICY": policy, "SERVING_CLIENT_HEADER": _HEADER}
                return serving(
                    model,
                    None,
                    **of_the_shell(**options, OPTION_MAX_ROLLING_BATCH_SIZE="32", SERVING_REQUEST_LOG="false"),
                )

            for policy in arguments.policy:
                measure(open_server, policy, arguments.requests, table)
        Console(width=130).print(table)


if __name__ == "__main__":
    main()
