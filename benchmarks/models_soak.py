"""Models registered, served, scaled and unregistered at random, under load: nothing may be left of them.

    python -m benchmarks.models_soak [--minutes 7] [--clients 16] [--models 4] [--seed 1]

One server with a model store, on the scripted executor. One thread changes models, the clients send requests to any of
them, streamed and whole, some hang up in mid-stream. A request may be answered with 200, with 404 where its model is
not registered, with 503 while it is loading or going, and its stream may end with an error where its model was
unregistered. Anything else is a failure, and so is what is left at the end: processes, descriptors, threads, files,
memory.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

from benchmarks.servers import Server, serving
from tests.support.client import JSON, body
from tests.support.models import scripted_model
from tests.support.processes import wait_until

_MOST_WORKERS = 3


class Soak:
    """The life of the models of one server."""

    def __init__(self, server: Server, names: list[str], seed: int) -> None:
        self.server = server
        self.names = names
        self.seed = seed
        self.ended = threading.Event()
        self.counts: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def change(self) -> None:
        """Change models, one thing after the other."""
        chance = random.Random(self.seed)
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as client:
            while not self.ended.is_set():
                name = chance.choice(self.names)
                what = chance.choice(["register", "register", "scale", "scale", "unregister"])
                if what == "register":
                    later = chance.random() < 0.3
                    answer = client.post("/models", params={"url": name, "synchronous": str(not later).lower()})
                    expected = (200, 202, 409)
                elif what == "scale":
                    answer = client.put(f"/models/{name}", params={"min_worker": chance.randint(1, _MOST_WORKERS)})
                    expected = (200, 404, 409)
                else:
                    answer = client.delete(f"/models/{name}")
                    expected = (200, 404)
                self._note(f"{what} {answer.status_code}", answer.status_code in expected, answer.text)
                time.sleep(chance.random() * 0.2)

    def ask(self, number: int) -> None:
        """Ask the models as a client does, until the end."""
        chance = random.Random(self.seed * 1000 + number)
        with httpx.Client(base_url=self.server.url, timeout=60, trust_env=False) as client:
            while not self.ended.is_set():
                path = f"/models/{chance.choice(self.names)}/invoke"
                content = body(chance.randint(1, 60), stream=(streamed := chance.random() < 0.7))
                try:
                    with client.stream("POST", path, content=content, headers=JSON) as answer:
                        if streamed and chance.random() < 0.1:
                            next(answer.iter_raw(), None)
                            self._note("hung up", True)
                            continue
                        text = answer.read()
                    kind = "stream with an error" if b"error_msg" in text else str(answer.status_code)
                    self._note(f"request {kind}", answer.status_code in (200, 404, 503), text.decode())
                except httpx.HTTPError as error:
                    self._note(f"request {type(error).__name__}", False, str(error))
                if answer.status_code != 200:
                    time.sleep(0.05)

    def _note(self, what: str, fine: bool, detail: str = "") -> None:
        self.counts[what] += 1
        if not fine:
            self.failures.append(f"{what}: {detail[:200]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        temporary, store = Path(folder) / "tmp", Path(folder) / "store"
        temporary.mkdir()
        names = [f"model-{number}" for number in range(arguments.models)]
        for name in names:
            scripted_model(store / name, {"steps_per_second": 200}, **{"option.shutdown_timeout": 2})
        first = scripted_model(Path(folder) / "first", {"steps_per_second": 200}, shutdown_timeout=2)
        environ = {
            "SERVING_MODEL_STORE": str(store),
            "DJL_CACHE_DIR": str(Path(folder) / "cache"),
            "TMPDIR": str(temporary),
        }
        with serving(first, **environ) as server:
            status = run(server, names, arguments, temporary)
    sys.exit(status)


def run(server: Server, names: list[str], arguments: argparse.Namespace, temporary: Path) -> int:
    """The soak, its table, and the exit status."""
    soak = Soak(server, names, arguments.seed)

    def rest() -> dict[str, float]:
        for name in names:
            server.http.delete(f"/models/{name}")
        wait_until(lambda: len(server.hosts()) == 1, 30, "one host")
        server.http.close()
        server.http = httpx.Client(base_url=server.url, timeout=30, trust_env=False)
        server.ping()
        time.sleep(2)
        return {
            "processes": len(server.descendants()),
            "descriptors": server.process.num_fds(),
            "threads": server.process.num_threads(),
            "files in TMPDIR": len(list(temporary.rglob("*"))),
            "memory of the server, MB": server.process.memory_info().rss / 1e6,
            "unfinished sequences": server.metric("running") + server.metric("waiting"),
        }

    def live(minutes: float) -> None:
        soak.ended.clear()
        threads = [threading.Thread(target=soak.change)]
        threads += [threading.Thread(target=soak.ask, args=(number,)) for number in range(arguments.clients)]
        for thread in threads:
            thread.start()
        time.sleep(minutes * 60)
        soak.ended.set()
        for thread in threads:
            thread.join()

    # Code paths, connection pools and allocators are warm after the first half.
    live(arguments.minutes / 2)
    before = rest()
    live(arguments.minutes / 2)
    after = rest()
    table = Table(title=f"{arguments.minutes:g} minutes, {arguments.clients} clients")
    for column in ("left at rest", "after the first half", "at the end"):
        table.add_column(column, justify="left" if column == "left at rest" else "right")
    for what, value in before.items():
        table.add_row(what, f"{value:,.1f}".removesuffix(".0"), f"{after[what]:,.1f}".removesuffix(".0"))
    console = Console(width=100)
    console.print(table)
    console.print(", ".join(f"{what}: {count:,}" for what, count in sorted(soak.counts.items())))
    for failure in soak.failures[:10]:
        console.print(failure)
    leaked = [what for what in before if what != "memory of the server, MB" and after[what] > before[what] + 2]
    grown = after["memory of the server, MB"] / before["memory of the server, MB"]
    if leaked or soak.failures or grown > 1.1:
        console.print(f"FAILED: left {leaked or 'nothing'}, {len(soak.failures)} failures, memory x {grown:.2f}")
        return 1
    console.print("nothing is left")
    return 0


if __name__ == "__main__":
    main()
