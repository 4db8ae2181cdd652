"""The engine process killed under greedy streams, again and again: none fails, and no output changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Answer, exchange, lmi
from tests.support.models import PROMPT, scripted_model, tensorrt_llm_model
from tests.support.prompts import SHORT, story
from tests.support.server import Server, serving
from tests.support.waiting import wait_until

STREAMS = 64
TOKENS = 200
LOGPROB_TOLERANCE = 0.03
"""What a KV cache of 16 bits changes at most, see `test_greedy.py`; a wrong position would be off by more than 1."""
OPTIONS = {"OPTION_MAX_ROLLING_BATCH_SIZE": str(STREAMS), "SERVING_RETRY_THRESHOLD": "20"}
SCRIPT: dict[str, object] = {"steps_per_second": 100}


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """`start(engine)`: a server on the bundled model, the scripted executor or the fake TensorRT-LLM."""
    with ExitStack() as stack:

        def start_one(engine: str) -> Server:
            directory = model
            environ: dict[str, str] = {}
            if engine == "scripted":
                directory = scripted_model(tmp_path / "model", SCRIPT)
            elif engine == "tensorrt_llm":
                directory, environ = tensorrt_llm_model(tmp_path / "model", SCRIPT)
            return stack.enter_context(serving(directory, tmp_path, **environ, **OPTIONS))

        yield start_one


def requests(engine: str, count: int) -> list[dict[str, Any]]:
    """Prompts of many lengths. What is scripted repeats them, and its texts have to differ."""
    if engine == "openvino":
        prompts = [*SHORT, *(story(1 + first % 7, first) for first in range(count))][:count]
    else:
        prompts = [f"{number} {PROMPT}" for number in range(count)]
    return [lmi(prompt, stream=True, max_new_tokens=TOKENS, details=True, ignore_eos=True) for prompt in prompts]


def told(answer: Answer) -> tuple[list[tuple[int, str]], str, Any]:
    """Every token with its text, the whole text, and the end. (Log-probabilities differ in the last digits.)"""
    lines = answer.lines
    return (
        [(line["token"]["id"], line["token"]["text"]) for line in lines],
        lines[-1]["generated_text"],
        {name: value for name, value in lines[-1]["details"].items() if name != "tokens"},
    )


def deviation(before: Answer, after: Answer) -> float:
    """How far the log-probabilities of the tokens differ at most; 0 where the engine reports none."""
    pairs = zip(before.lines, after.lines, strict=True)
    figures = [(one["token"]["log_prob"], other["token"]["log_prob"]) for one, other in pairs]
    return max((abs(one - other) for one, other in figures if one is not None), default=0.0)


async def kill_under(server: Server, asked: list[dict[str, Any]], kills: int) -> list[Answer]:
    """Send all, and kill the engine process each time that some tokens have come."""
    restarts = server.metric("executor_restarts_total")
    answers = asyncio.gather(*(exchange(server.port, request) for request in asked))
    share = len(asked) * TOKENS // (kills + 1)
    begun = server.metric("generated_tokens_total")

    def kill(number: int) -> None:
        wait_until(lambda: server.metric("generated_tokens_total") >= begun + number * share, what="tokens")
        server.host().kill()
        wait_until(lambda: server.metric("executor_restarts_total") == restarts + number, what="a new host")

    for number in range(1, kills + 1):
        await asyncio.to_thread(kill, number)
    return await answers


@pytest.mark.parametrize(
    ("engine", "streams", "kills"),
    [
        ("openvino", 16, 2),
        pytest.param("openvino", STREAMS, 10, marks=pytest.mark.slow),
        pytest.param("scripted", STREAMS, 10, marks=pytest.mark.slow),
        pytest.param("tensorrt_llm", STREAMS, 10, marks=pytest.mark.slow),
    ],
)
def test_greedy_streams_are_those_of_a_quiet_run(
    start: Callable[[str], Server], engine: str, streams: int, kills: int
) -> None:
    server, asked = start(engine), requests(engine, streams)
    quiet = server.together(asked)
    answers = asyncio.run(kill_under(server, asked, kills))
    for before, after in zip(quiet, answers, strict=True):
        assert (after.status, after.complete) == (200, True)
        assert told(after) == told(before)
        assert deviation(before, after) < LOGPROB_TOLERANCE
    assert server.metric("executor_restarts_total") == kills
    assert server.metric("resumed_total") > streams
    assert server.finished("error") == 0
