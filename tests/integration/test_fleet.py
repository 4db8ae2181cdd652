"""Three servers start at once where nothing is compiled yet: one compiles, also when the first to try is killed."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from djl_trtllm.engines.cache import EngineCache
from tests.support.models import tensorrt_llm_model
from tests.support.processes import wait_until
from tests.support.s3 import MOTO_BUCKET, age, keys, moto_server, variables
from tests.support.server import START_SECONDS, Server, environment, run_cli

pytestmark = pytest.mark.slow

SERVERS = 3
FLEET_CACHE = f"s3://{MOTO_BUCKET}/engines"


class Fleet:
    """Servers of one checkpoint, each with the cache directory that `cache_of` gives for its number."""

    def __init__(self, root: Path, cache_of: Callable[[int], Path], build_seconds: float, **environ: str) -> None:
        self.model, fake = tensorrt_llm_model(
            root / "model",
            {"build_seconds": build_seconds},
            **{
                "option.backend": "tensorrt",
                "option.max_rolling_batch_size": 4,
                "option.max_seq_len": 1024,
                "option.max_output_len": 512,
            },
        )
        self._calls = root / "calls.jsonl"
        self._cache_of = cache_of
        self._fake = {**fake, **environ, "FAKE_TENSORRT_LLM_LOG": str(self._calls)}
        self.servers: list[Server] = []

    def environ(self, number: int) -> dict[str, str]:
        """The environment of the server of this number, and of commands on its machine."""
        return environment(self._cache_of(number), **self._fake, OPTION_ENGINE_CACHE_DIR=str(self._cache_of(number)))

    def start(self, number: int) -> Server:
        """Start one more server."""
        server = Server(self.model, self.environ(number))
        self.servers.append(server)
        return server

    def compiles(self) -> int:
        """How often TensorRT-LLM was asked for a build."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return sum("build_config" in json.loads(line)["arguments"] for line in lines)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until `condition` holds. AssertionError: a server has ended."""

        def held() -> bool:
            for server in self.servers:
                assert server.process.poll() is None, "\n".join(["a server ended:", *server.log[-60:]])
            return condition()

        wait_until(held, START_SECONDS, what)

    def answers(self) -> None:
        """Every server becomes ready and answers a request; all with the same text."""
        for server in self.servers:
            # Asking /ping every few milliseconds would take the servers' time.
            self.wait_until(functools.partial(server.says, " is ready: "), "a server that is ready")
            server.wait_for_ping()
        with ThreadPoolExecutor(SERVERS) as threads:
            answers = list(threads.map(lambda server: server.generate(4), self.servers))
        assert [answer.status_code for answer in answers] == [200] * SERVERS
        assert len({answer.json()["generated_text"] for answer in answers}) == 1

    def kill_the_builder(self) -> int:
        """Half-way through the build, with everything it started; the number of the server that it was."""
        self.wait_until(lambda: bool(self.building()), "a server that compiles")
        (number,) = self.building()
        builder = self.servers[number]
        compiler = builder.descendants()
        assert compiler
        for process in (*compiler, builder.process):
            process.kill()
        builder.close()
        self.servers.remove(builder)
        return number

    def building(self) -> list[int]:
        """The servers whose compiler is in the middle of its work."""
        return [number for number, server in enumerate(self.servers) if server.says("compiling: build")]

    def tellers(self, text: str) -> int:
        """How many servers have a log with this text."""
        return sum(server.says(text) for server in self.servers)

    def check_caches(self) -> None:
        """`djl-trtllm cache verify` finds a whole engine, each cache has that one, and nothing unfinished beside it."""
        verified = run_cli("cache", "verify", environ=self.environ(0))
        assert verified.returncode == 0, verified.stderr
        assert verified.stderr.count(": whole") == 1, verified.stderr
        for cache in {self._cache_of(number) for number in range(SERVERS)}:
            (entry,) = EngineCache(cache).entries()
            assert f"{entry.key}: whole" in verified.stderr and entry.verify() == []
            assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == []

    def close(self) -> None:
        """End all servers; what they have started goes with them."""
        with contextlib.ExitStack() as stack:
            for server in self.servers:
                stack.callback(server.close)


@contextlib.contextmanager
def fleet(root: Path, cache_of: Callable[[int], Path], build_seconds: float, **environ: str) -> Iterator[Fleet]:
    """Servers that have just been started."""
    started = Fleet(root, cache_of, build_seconds, **environ)
    try:
        for number in range(SERVERS):
            started.start(number)
        yield started
    finally:
        started.close()


@pytest.fixture
def aws() -> Iterator[str]:
    with moto_server() as url:
        yield url


def in_s3(url: str) -> dict[str, str]:
    return {**variables(url), "OPTION_ENGINE_CACHE": FLEET_CACHE}


def leases(url: str) -> list[str]:
    return [key for key in keys(url, "engines/") if key.endswith(".lease")]


def let_the_lease_expire() -> None:
    """What a minute does that nobody renews it in."""
    age(".lease", 120)


def check_store(url: str) -> None:
    """One engine is in S3, and the lease was given back."""
    entries = [key for key in keys(url, "engines/") if key.count("/") == 1]
    assert len(entries) == 1 and entries[0].endswith(".json"), entries
    assert len({key.split("/")[2] for key in keys(url, "engines/") if key.count("/") > 1}) == 1


def test_servers_on_one_directory_outlive_their_builder(tmp_path: Path) -> None:
    with fleet(tmp_path, lambda number: tmp_path / "cache", 8.0) as servers:
        servers.start(servers.kill_the_builder())
        servers.answers()
        assert servers.compiles() == 2
        servers.check_caches()


def test_servers_with_a_cache_in_s3_outlive_their_builder(tmp_path: Path, aws: str) -> None:
    with fleet(tmp_path, lambda number: tmp_path / f"cache-{number}", 8.0, **in_s3(aws)) as servers:
        killed = servers.kill_the_builder()
        assert len(leases(aws)) == 1 and len(keys(aws)) == 1
        let_the_lease_expire()
        servers.start(killed)
        servers.answers()
        assert servers.compiles() == 2
        servers.check_caches()
        assert servers.tellers("downloaded the engine from") == SERVERS - 1
    check_store(aws)
