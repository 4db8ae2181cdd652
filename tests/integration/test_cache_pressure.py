"""A KV cache that is far too small for what is asked loses no request and changes no answer."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.client import Answer, exchange, lmi
from tests.support.prompts import story
from tests.support.server import Server, serving
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POOL_TOKENS = 2048
REQUESTS = 200
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


def test_every_request_that_is_not_cancelled_ends_with_its_sequential_answer(
    server: Server, tight: Server, tokenizer: Tokenizer
) -> None:
    offered = [lmi(prompt, stream=True, details=True, max_new_tokens=length) for prompt, length in kinds()]
    # One after the other, on a server with room and without reuse.
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
    assert tight.metric("finished_total") - finished == REQUESTS == tight.metric("requests_total") - asked
    assert tight.metric("reused_prompt_tokens_total") > 0


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(tight: Server) -> None:
    answer = tight.post("wolf " * 1000, max_new_tokens=500)
    assert answer.status_code == 424
    error = answer.json()["error"]
    assert re.search("the prompt has 10.. tokens and max_new_tokens is 500", error)
    assert re.search(r"1400 \(max_seq_len\): 3.. are left", error)
