"""Models whose files would cost the server minutes or gigabytes are refused while it answers.

`python -m pytest -s` with this file prints what each costs; docs/verification.md has the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.hostile import Times, late
from tests.support.hostile_models import HOSTILE, LARGE, LOOP, OTHERS, write_hostile, write_large
from tests.support.models import scripted_model
from tests.support.pings import cpu_seconds
from tests.support.processes import PATIENCE, InBackground, wait_until
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow

QUIET = 200
"""Answers of /ping before all registrations, for comparison: the machine may be busy."""
MOST_SECONDS = 0.1
"""Processor time that the server may use during a /ping: what holds it up, on a busy machine too."""
STARVED_SECONDS = 0.02
"""A /ping for which a thread waits as long for a processor says nothing: the server's other threads run meanwhile."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("store")
    write_hostile(store)
    return store


@contextmanager
def started(store: Path, folder: Path) -> Iterator[Server]:
    model = scripted_model(folder / "model", {"steps_per_second": 100})
    with serving(model, SERVING_MODEL_STORE=str(store), DJL_CACHE_DIR=str(folder / "cache")) as server:
        yield server


@pytest.fixture(scope="module")
def server(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(store, tmp_path_factory.mktemp("first")) as server:
        yield server


def starved_seconds(pid: int) -> float:
    """How long this thread and a server's event loop have waited for a processor, in seconds (proc_pid_schedstat)."""
    threads = (Path("/proc/thread-self/schedstat"), Path(f"/proc/{pid}/task/{pid}/schedstat"))
    return sum(int(each.read_text().split()[1]) for each in threads) / 1e9


class Pings(InBackground):
    """What each /ping took during the block."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.times = Times()
        super().__init__()

    def _run(self) -> None:
        pid = self.server.process.pid
        with httpx.Client(base_url=self.server.url, timeout=PATIENCE, trust_env=False) as client:
            while not self._end.is_set():
                starved, began, before = starved_seconds(pid), time.perf_counter(), cpu_seconds(pid)
                assert client.get("/ping").status_code == 200
                used = cpu_seconds(pid) - before
                self.times.passed.append(time.perf_counter() - began)
                if starved_seconds(pid) - starved < STARVED_SECONDS:
                    self.times.used.append(used)
                time.sleep(0.005)


@pytest.fixture(scope="module")
def quiet(server: Server) -> float:
    """The most seconds that /ping takes while nothing is registered."""
    return max(answers_of_ping(server).passed)


def answers_of_ping(server: Server) -> Times:
    with Pings(server) as pings:
        wait_until(lambda: len(pings.times.passed) >= QUIET)
    return pings.times


def register(server: Server, name: str, quiet: float, model_name: str = "m") -> tuple[httpx.Response, Times]:
    """The answer to the registration of a model, and what it did to /ping; prints both."""
    before = server.process.memory_info().rss
    with Pings(server) as pings:
        wait_until(lambda: bool(pings.times.passed))
        began = time.perf_counter()
        answer = server.http.post("/models", params={"url": name, "model_name": model_name})
        seconds = time.perf_counter() - began
    more = server.process.memory_info().rss - before
    times = pings.times
    print(
        f"{name:32} {answer.status_code} after {seconds:6.2f} s; {len(times.passed):4} /ping, p99.9 "
        f"{late(times.passed) * 1e3:5.0f} ms ({quiet * 1e3:3.0f} ms quiet), of the server's processor "
        f"{late(times.used) * 1e3:3.0f} ms; {more / 1e6:+5.0f} MB; {answer.text[-80:]!r}"
    )
    return answer, times


@pytest.mark.parametrize("name", [*HOSTILE, *OTHERS, LOOP])
def test_a_model_that_would_cost_much_is_refused_while_the_server_answers(
    server: Server, quiet: float, name: str
) -> None:
    answer, times = register(server, name, quiet)
    assert 400 <= answer.status_code < 600 and len(answer.content) < 10_000
    assert answer.status_code == 400 or name != LOOP
    assert late(times.used) <= MOST_SECONDS
    assert server.ping() == 200 and server.generate().status_code == 200


def test_a_model_with_a_large_tokenizer_is_served(quiet: float, tmp_path: Path) -> None:
    """Its tokenizer is what the server has to make itself: in one call of the library, which holds up one /ping.

    Freeing it, at a time of Python's own, holds up another one: that is not to be another test's.
    """
    write_large(tmp_path)
    with started(tmp_path, tmp_path) as server:
        answer, times = register(server, LARGE, quiet, "large")
        assert answer.status_code == 200
        assert max(sorted(times.used)[:-1], default=0.0) <= MOST_SECONDS
        assert server.http.delete("/models/large").status_code == 200
