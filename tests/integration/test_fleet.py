"""Eight servers start at once where nothing is compiled yet: one compiles, also when the first to try is killed."""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends

from djl_trtllm.engine.cache import EngineCache
from tests.support.harness import environment, run_cli
from tests.support.moto_server import BUCKET, keys, moto_server
from tests.support.s3_server import variables
from tests.support.serving_process import ServingProcess, tensorrt_llm_model, wait_until

SERVERS = 8
FLEET_CACHE = f"s3://{BUCKET}/engines"


def told(log: list[str], text: str) -> bool:
    """Whether a line of the log has this text."""
    return any(text in line for line in list(log))


class Fleet:
    """Servers of one checkpoint, each with the cache directory that `cache_of` gives for its number."""

    def __init__(self, root: Path, cache_of: Callable[[int], Path], build_seconds: float, **environ: str) -> None:
        self.model, fake = tensorrt_llm_model(
            root / "model",
            {"build_seconds": build_seconds},
            backend="tensorrt",
            **{"option.max_rolling_batch_size": 4, "option.max_seq_len": 1024, "option.max_output_len": 512},
        )
        self._calls = root / "calls.jsonl"
        self._cache_of = cache_of
        self._fake = {**fake, **environ, "FAKE_TENSORRT_LLM_LOG": str(self._calls)}
        self.servers: list[ServingProcess] = []

    def environ(self, number: int) -> dict[str, str]:
        """Of the server of this number, and of commands on its machine."""
        return environment(self._cache_of(number), **self._fake, OPTION_ENGINE_CACHE_DIR=str(self._cache_of(number)))

    def start(self, number: int) -> ServingProcess:
        """One more server."""
        server = ServingProcess(self.model, self.environ(number))
        self.servers.append(server)
        return server

    def compiles(self) -> int:
        """How often TensorRT-LLM was asked for a build."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return sum("build_config" in json.loads(line)["arguments"] for line in lines)

    def answers(self) -> None:
        """Every server becomes ready and answers a request; all with the same text."""
        for server in self.servers:
            # Asking /ping every few milliseconds would take the servers' time.
            wait_until(lambda log=server.log: told(log, " is ready: "), 120, "a server that is ready")  # type: ignore[misc]
            server.wait_for_ping()
        with ThreadPoolExecutor(SERVERS) as threads:
            answers = list(threads.map(lambda server: server.generate(4), self.servers))
        assert [answer.status_code for answer in answers] == [200] * SERVERS
        assert len({answer.json()["generated_text"] for answer in answers}) == 1

    def kill_the_builder(self) -> int:
        """Half-way through the build, with everything it started; the number of the server that it was."""
        wait_until(lambda: bool(self.building()), 60, "a server that compiles")
        (number,) = self.building()
        builder = self.servers[number]
        processes = [*builder.descendants(), builder.info]
        assert len(processes) > 1, "no compiler"
        for process in processes:
            process.kill()
        psutil.wait_procs(processes, 10)
        builder.close()
        self.servers.remove(builder)
        return number

    def building(self) -> list[int]:
        """The servers whose compiler is in the middle of its work."""
        return [number for number, server in enumerate(self.servers) if told(server.log, "compiling: build")]

    def tellers(self, text: str) -> int:
        """How many servers have a log with this text."""
        return sum(told(server.log, text) for server in self.servers)

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
        """End all servers; their executor hosts go with them."""
        hosts = [host for server in self.servers for host in server.descendants()]
        for server in self.servers:
            server.close()
        _, alive = psutil.wait_procs(hosts, timeout=10)
        for host in alive:
            host.kill()
        assert not alive, "an executor host outlived its server"


@contextlib.contextmanager
def fleet(root: Path, cache_of: Callable[[int], Path], build_seconds: float, **environ: str) -> Iterator[Fleet]:
    """Eight servers that have just been started."""
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
    bucket = s3_backends[DEFAULT_ACCOUNT_ID]["aws"].buckets[BUCKET]
    (lease,) = (key for name, key in bucket.keys.items() if name.endswith(".lease"))
    lease.last_modified -= datetime.timedelta(minutes=2)


def check_store(url: str) -> None:
    """One engine is in S3, and the lease was given back."""
    entries = [key for key in keys(url, "engines/") if key.count("/") == 1]
    assert len(entries) == 1 and entries[0].endswith(".json"), entries
    assert len({key.split("/")[2] for key in keys(url, "engines/") if key.count("/") > 1}) == 1


def test_eight_servers_on_one_directory_compile_once(tmp_path: Path) -> None:
    with fleet(tmp_path, lambda number: tmp_path / "cache", 2.0) as servers:
        servers.answers()
        assert servers.compiles() == 1
        servers.check_caches()
        assert servers.tellers("another process is compiling this engine") > 1


def test_eight_servers_on_one_directory_outlive_their_builder(tmp_path: Path) -> None:
    with fleet(tmp_path, lambda number: tmp_path / "cache", 4.0) as servers:
        servers.start(servers.kill_the_builder())
        servers.answers()
        assert servers.compiles() == 2
        servers.check_caches()


def test_eight_servers_with_a_cache_in_s3_compile_once(tmp_path: Path, aws: str) -> None:
    with fleet(tmp_path, lambda number: tmp_path / f"cache-{number}", 2.0, **in_s3(aws)) as servers:
        servers.answers()
        assert servers.compiles() == 1
        servers.check_caches()
        assert servers.tellers("the engine came from") == SERVERS - 1
    check_store(aws)


def test_eight_servers_with_a_cache_in_s3_outlive_their_builder(tmp_path: Path, aws: str) -> None:
    with fleet(tmp_path, lambda number: tmp_path / f"cache-{number}", 4.0, **in_s3(aws)) as servers:
        killed = servers.kill_the_builder()
        assert len(leases(aws)) == 1 and len(keys(aws)) == 1
        let_the_lease_expire()
        servers.start(killed)
        servers.answers()
        assert servers.compiles() == 2
        servers.check_caches()
        assert servers.tellers("the engine came from") == SERVERS - 1
    check_store(aws)
