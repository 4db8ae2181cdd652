"""Engine processes that are killed under streams, memory that is too small, and long prompts: no request is lost.

KILLS is how often the process of TensorRT-LLM is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.model import Tokenizer
from tests.engines.helpers import write_checkpoint
from tests.fakes.installation import fake_tensorrt_llm
from tests.support.client import Answer, exchange, lmi
from tests.support.hostile import Pinging
from tests.support.models import PROMPT, tensorrt_llm_model
from tests.support.processes import wait_until
from tests.support.reference import SHORT, story
from tests.support.server import Server, environment, run_cli, serving

# -- the engine process killed under greedy streams, again and again: none fails, and no output changes ----------------

STREAMS = 32
TOKENS = 120
KILLS = int(os.environ.get("KILLS", "2"))
LOGPROB_TOLERANCE = 0.03
"""What a KV cache of 16 bits changes at most, see `test_greedy.py`; a wrong position would be off by more than 1."""
OPTIONS = {"OPTION_MAX_ROLLING_BATCH_SIZE": str(STREAMS), "SERVING_RETRY_THRESHOLD": "20"}
SCRIPT: dict[str, object] = {"steps_per_second": 100}


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Callable[[str], Server]]:
    """`start(engine)`: a server on the bundled model or the fake TensorRT-LLM."""
    with ExitStack() as stack:

        def start_one(engine: str) -> Server:
            directory = model
            environ: dict[str, str] = {}
            if engine == "tensorrt_llm":
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


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "streams", "kills"), [("openvino", 16, KILLS), ("tensorrt_llm", STREAMS, KILLS)])
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


# -- long prompts keep nobody waiting for /ping ------------------------------------------------------------------------
#
# (benchmarks/end_to_end.py measures how short the stalls are.)

PROMPTS = 8


@pytest.mark.slow
def test_ping_is_answered_while_long_prompts_are_read(server: Server, tokenizer: Tokenizer) -> None:
    prompts = [f"Story number {number}. {story(145, number)}" for number in range(PROMPTS)]
    assert all(2000 < len(tokenizer.encode(prompt)) < 2560 for prompt in prompts)
    with Pinging(server) as pinging:
        answers = server.together([lmi(prompt, stream=True, max_new_tokens=4) for prompt in prompts])
    assert all(answer.complete for answer in answers)
    assert set(pinging.statuses) == {200}
    begun, told = max(answer.asked for answer in answers), max(answer.arrivals[0] for answer in answers)
    # An engine that held the server up would let it answer once between two steps, of which there are few.
    assert sum(begun < at < told for at, _ in pinging.seen) > 3 * PROMPTS


# -- Memory that is too small: a full KV cache loses no request, and what cannot fit is reported before it is compiled

POOL_TOKENS = 2048
REQUESTS = 120
BEGINNINGS = 5
KINDS = 40


@pytest.fixture(scope="module")
def tight(model: Path, scratch: Path) -> Iterator[Server]:
    """A server with prefix reuse and a small pool."""
    with serving(
        model,
        scratch,
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE=str(POOL_TOKENS),
        OPTION_ENABLE_KV_CACHE_REUSE="true",
        OPTION_MAX_SEQ_LEN="1400",
    ) as started:
        yield started


def kinds() -> list[tuple[str, int]]:
    """Prompts (some 100 to 250 tokens, in five families with a common beginning) and lengths."""
    rng = random.Random(3)
    return [(f"{story(5, at % BEGINNINGS)} {story(1 + at // 8, at % 16)}", rng.randint(24, 90)) for at in range(KINDS)]


@pytest.mark.slow
def test_every_request_that_is_not_cancelled_ends_with_its_sequential_answer(
    server: Server, tight: Server, tokenizer: Tokenizer
) -> None:
    offered = [lmi(prompt, stream=True, details=True, max_new_tokens=length) for prompt, length in kinds()]
    # One after the other, on a server with room.
    sequential = [server.together([request])[0] for request in offered]
    rng = random.Random(4)
    order = [at % KINDS for at in range(REQUESTS)]
    rng.shuffle(order)
    tokens = sum(len(tokenizer.encode(kinds()[at][0])) + len(sequential[at].token_ids) for at in order)
    assert tokens >= 10 * POOL_TOKENS
    leaving = [rng.choice((None, None, None, rng.randint(0, 40))) for _ in order]

    async def all_at_once() -> list[Answer]:
        return await asyncio.gather(
            *(exchange(tight.port, offered[at], leave_after=leave) for at, leave in zip(order, leaving, strict=True))
        )

    finished, asked = tight.metric("finished_total"), tight.metric("requests_total")
    answers = asyncio.run(all_at_once())
    wait_until(tight.idle, what="an idle server")

    stayed = [(at, answer) for at, answer, leave in zip(order, answers, leaving, strict=True) if leave is None]
    assert len(stayed) > REQUESTS // 2
    for at, answer in stayed:
        assert answer.status == 200
        assert answer.complete
        assert answer.lines[-1]["details"]["finish_reason"] in ("eos_token", "length")
        assert answer.token_ids == sequential[at].token_ids
    assert tight.finished("error") == 0
    assert tight.finished("cancelled") > 0
    # A client that leaves as soon as its request is sent may reset the connection before the server reads it.
    came = tight.metric("requests_total") - asked
    assert REQUESTS - leaving.count(0) <= came == tight.metric("finished_total") - finished <= REQUESTS
    assert tight.metric("reused_prompt_tokens_total") > 0


# -- what does not fit is reported before anything is compiled, and refused on request; what fits is chosen ------------

TIGHT = 1 << 30
"""Less than a TensorRT engine takes for itself."""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def run(tmp_path: Path, memory: int, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine with a GPU of this memory."""
    fake = fake_tensorrt_llm(tmp_path / "machine", gpu_name="NVIDIA A10G", memory=memory)
    variables["OPTION_ENGINE_CACHE_DIR"] = str(tmp_path / "cache")
    return run_cli(*arguments, environ=environment(tmp_path, **fake, **variables))


def test_strict_memory_refuses_it_and_compiles_nothing(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    served = run(tmp_path, TIGHT, "serve", str(checkpoint), "--strict-memory", SERVING_INFERENCE_PORT="0")
    assert served.returncode == 1
    assert "does not fit: out of memory is expected on NVIDIA A10G, tp 1" in served.stderr
    assert "OPTION_STRICT_MEMORY" in served.stderr
    assert "compiling: " not in served.stderr
    assert list((tmp_path / "cache").glob("tensorrt-*")) == []


@pytest.mark.slow
def test_an_engine_is_compiled_for_what_fits_and_keeps_it(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "machine").mkdir()
    memory = 23028 << 20
    out = tmp_path / "out"
    compiled = run(tmp_path, memory, "compile", str(checkpoint), str(out), "--max_rolling_batch_size=16")
    assert compiled.returncode == 0, compiled.stderr
    assert json.loads((out / "config.json").read_text())["build_config"]["max_num_tokens"] == 16 * 256
    assert "max_num_tokens" not in (out / "serving.properties").read_text()
    shown = run(tmp_path, memory, "config", str(out), "--json")
    option = json.loads(shown.stdout)["options"]["max_num_tokens"]
    assert option["value"] == 16 * 256 and "build_config in" in option["origin"]["text"]
