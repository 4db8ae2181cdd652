"""vLLM on one GPU: an engine process that is killed, memory that is taken, and requests that come and go for long.

`pytest -s` prints what was measured, in lines that begin with `measured`. CHURN_SECONDS bounds the last of them.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from pathlib import Path

import psutil
import pytest

from djl_trtllm.backends.vllm.names import installed_version
from tests.gpu.kit import START_SECONDS, check_that_it_says, check_the_end_of, copying, figure, taken, used_bytes
from tests.support.client import exchange
from tests.support.processes import wait_until
from tests.support.server import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("nvidia-smi") is None or installed_version() is None, reason="needs a GPU and vLLM"
    ),
]

STREAMS = 256
CHURN = float(os.environ.get("CHURN_SECONDS", "60"))
MIB = 1 << 20
MARGIN = 0.001
"""The share of the free memory that other programs leave: less than an iteration of prompts needs."""


def engine(server: Server) -> psutil.Process:
    (host,) = (each for each in server.hosts() if "djl_trtllm.executor.process" in each.cmdline())
    return host


def test_an_engine_that_is_killed_under_greedy_streams_is_a_pause(copier: Path, tmp_path: Path) -> None:
    before = used_bytes()
    with Server(copier, {}, tmp_path) as server:
        server.wait_for_ping(timeout=START_SECONDS)
        check_the_end_of(engine, server, STREAMS, before)
        server.terminate()
        assert server.wait() == 0


def test_memory_that_is_taken_is_said_when_the_model_is_loaded(copier: Path, tmp_path: Path) -> None:
    with taken(0), Server(copier, {}, tmp_path) as server:
        check_that_it_says(server, "Free memory on device cuda:0")


def test_memory_that_is_taken_while_it_serves_ends_no_server(copier: Path, tmp_path: Path) -> None:
    with Server(copier, {}, tmp_path) as server:
        server.wait_for_ping(timeout=START_SECONDS)
        requests = [copying(number) for number in range(STREAMS)]
        quiet = server.together(requests, at_once=STREAMS)
        with taken(0, 1.0 - MARGIN):
            answers = server.together(requests, at_once=STREAMS)
            failed = sum(not answer.complete for answer in answers)
            figure("streams that fail while memory is taken", failed, f"of {STREAMS}")
            figure("engines that ended", server.metric("executor_restarts_total"), "")
        server.wait_for_ping(timeout=START_SECONDS)
        again = server.together(requests, at_once=STREAMS)
        assert [answer.token_ids for answer in again] == [answer.token_ids for answer in quiet]
        server.terminate()
        assert server.wait() == 0


def test_memory_does_not_grow_where_requests_come_and_go(copier: Path, tmp_path: Path) -> None:
    with Server(copier, {}, tmp_path) as server:
        server.wait_for_ping(timeout=START_SECONDS)
        served = [asyncio.run(churn(server, min(20.0, CHURN / 3)))]
        before = state(server)
        served.append(asyncio.run(churn(server, CHURN)))
        after = state(server)
        figure(f"requests in {CHURN:g} s, a third of which their clients left", served[1], "")
        for name, first, last in zip(("server", "engine process", "GPU"), before, after, strict=True):
            figure(f"{name}, before", first / MIB, "MiB")
            figure(f"{name}, after", last / MIB, "MiB")
        assert server.finished("error") == 0 and server.metric("executor_restarts_total") == 0
        assert after[2] <= before[2] + 64 * MIB
        server.terminate()
        assert server.wait() == 0


def state(server: Server) -> tuple[int, int, int]:
    """Resident bytes of the server and of its engine process, and used bytes of the first GPU, once it is idle."""
    wait_until(server.idle, what="waiting and running at 0")
    return server.process.memory_info().rss, engine(server).memory_info().rss, used_bytes()[0]


async def churn(server: Server, seconds: float) -> int:
    """Keep 128 clients busy with requests of random lengths. They leave a third. Returns the number of requests."""
    over = time.monotonic() + seconds
    chance = random.Random(5)
    numbers = iter(range(1 << 30))

    async def client() -> None:
        while time.monotonic() < over:
            request = copying(next(numbers) + chance.randrange(1 << 20))
            request["parameters"]["max_new_tokens"] = chance.randint(1, 200)
            await exchange(server.port, request, leave_after=chance.choice([None, None, chance.randint(0, 20)]))

    await asyncio.gather(*(client() for _ in range(128)))
    return next(numbers)
