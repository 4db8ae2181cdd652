"""Clients that come and go at random change nothing for those that stay, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import observed
from tests.support.client import Answer, exchange, lmi
from tests.support.prompts import SHORT, story
from tests.support.server import POOL, Server, running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

STREAMS = 64
SECONDS = float(os.environ.get("DJL_TRTLLM_CHAOS_SECONDS", "10"))
"""60 is what a release is checked with."""


@pytest.fixture(scope="module")
def count_file(scratch: Path) -> Path:
    return scratch / "tasks"


@pytest.fixture(scope="module")
def crowded(model: Path, scratch: Path, count_file: Path) -> Iterator[Server]:
    """A server that writes down its number of tasks, with fewer places than there are streams."""
    program = (observed.__file__, str(count_file))
    with running(Server(model, {"OPTION_MAX_ROLLING_BATCH_SIZE": "48"}, scratch, program)) as started:
        yield started


def tasks(server: Server, count_file: Path) -> int:
    count_file.unlink(missing_ok=True)
    server.process.send_signal(signal.SIGUSR1)
    wait_until(count_file.exists, what="a count of tasks")
    return int(count_file.read_text())


def level(server: Server, count_file: Path) -> dict[str, int]:
    """What a quiet server holds."""
    wait_until(server.idle, what="an idle server")
    counted = tasks(server, count_file)
    host = server.host()
    return {
        "tasks": counted,
        "threads": server.process.num_threads(),
        "files": server.process.num_fds(),
        "host threads": host.num_threads(),
        "host files": host.num_fds(),
    }


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What is more than before; asyncio keeps threads for what blocks, from the first such work on."""
    room = {"threads": POOL}
    return {name: after[name] for name in before if after[name] > before[name] + room.get(name, 0)}


def requests() -> list[dict[str, Any]]:
    rng = random.Random(1)
    prompts = [*SHORT, *(story(1 + first % 7, first) for first in range(16))]
    return [lmi(prompt, stream=True, max_new_tokens=rng.randint(8, 80)) for prompt in prompts]


def told(answer: Answer) -> tuple[list[int], list[str], str]:
    """Tokens, their texts, the whole text. (Log-probabilities differ in the last digits by the batch they ran in.)"""
    lines = answer.lines
    tokens = [line["token"] for line in lines]
    return [token["id"] for token in tokens], [token["text"] for token in tokens], lines[-1]["generated_text"]


async def come_and_go(port: int, seconds: float, seed: int) -> tuple[list[tuple[int, Answer]], int]:
    """The answers that were waited for, by request, and how many were left. For longer where that were few."""
    rng = random.Random(seed)
    offered = requests()
    deadline = time.monotonic() + seconds
    stayed: list[tuple[int, Answer]] = []
    left = 0

    async def client() -> None:
        nonlocal left
        while time.monotonic() < deadline or min(len(stayed), left) <= STREAMS:
            at = rng.randrange(len(offered))
            leave_after = rng.choice((None, None, 0, 1, rng.randint(2, 60)))
            answer = await exchange(port, offered[at], leave_after=leave_after, reset=rng.random() < 0.5)
            if leave_after is None:
                stayed.append((at, answer))
            else:
                left += 1

    await asyncio.gather(*(client() for _ in range(STREAMS)))
    return stayed, left


@pytest.mark.timeout(900 + SECONDS)
def test_those_who_stay_get_their_sequential_answer(crowded: Server, count_file: Path) -> None:
    sequential = [crowded.together([request])[0] for request in requests()]
    assert all(answer.complete for answer in sequential)
    asyncio.run(come_and_go(crowded.port, 1, seed=0))
    before = level(crowded, count_file)

    stayed, left = asyncio.run(come_and_go(crowded.port, SECONDS, seed=2))

    assert len(stayed) > STREAMS
    assert left > STREAMS
    for at, answer in stayed:
        assert answer.status == 200
        assert answer.complete
        assert told(answer) == told(sequential[at])
    # A task may be about to end when it is counted; one that was leaked stays.
    wait_until(lambda: not grown(before, level(crowded, count_file)), what=f"no more than {before}")
