"""With prefix reuse, a prompt that begins as an earlier one is answered sooner, and the metric says why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from djl_trtllm.model import Tokenizer
from tests.support.client import lmi
from tests.support.prompts import story
from tests.support.server import Server, serving

REUSED = "reused_prompt_tokens_total"


@pytest.fixture(scope="module")
def reusing(model: Path, scratch: Path) -> Iterator[Server]:
    with serving(
        model,
        scratch,
        OPTION_ENABLE_KV_CACHE_REUSE="true",
        OPTION_MAX_INPUT_LEN="2560",
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE="32768",
    ) as started:
        yield started


def prefix(number: int, sentences: int) -> str:
    """A text that begins unlike any other number's."""
    return f"Story number {number}. {story(sentences, number % 16)}"


def first_token_seconds(server: Server, prompt: str) -> float:
    (answer,) = server.together([lmi(prompt, stream=True, max_new_tokens=2)])
    assert answer.complete
    return answer.time_to_first_token


def test_a_shared_prefix_is_counted(reusing: Server, tokenizer: Tokenizer) -> None:
    shared = prefix(0, 14)
    length = len(tokenizer.encode(shared))
    assert length > 200
    before = reusing.metric(REUSED)
    reusing.post(f"{shared} The wolf", max_new_tokens=1)
    assert reusing.metric(REUSED) == before
    reusing.post(f"{shared} The grandmother", max_new_tokens=1)
    reused = reusing.metric(REUSED) - before
    assert length - 32 <= reused <= length
    assert reused % 32 == 0


@pytest.mark.slow
def test_a_shared_prefix_makes_the_first_token_come_sooner(reusing: Server, tokenizer: Tokenizer) -> None:
    cold, warm = [], []
    for number in range(1, 8):
        shared = prefix(number, 85)
        assert 1200 < len(tokenizer.encode(shared)) < 2200
        cold.append(first_token_seconds(reusing, f"{shared} The wolf"))
        warm.append(first_token_seconds(reusing, f"{shared} The grandmother"))
    # The least of several, which a busy machine disturbs least.
    assert min(warm) < min(cold) / 2, f"cold {cold}, warm {warm}"


def test_reuse_does_not_change_the_answer(reusing: Server, server: Server) -> None:
    for ending in ("The wolf", "The grandmother", "The wolf"):
        prompt = f"{prefix(9, 20)} {ending}"
        assert reusing.token_ids(prompt, max_new_tokens=32) == server.token_ids(prompt, max_new_tokens=32)


def test_without_the_option_nothing_is_reused(server: Server) -> None:
    prompt = prefix(0, 14)
    assert server.token_ids(prompt, max_new_tokens=4) == server.token_ids(prompt, max_new_tokens=4)
    assert server.metric(REUSED) == 0
