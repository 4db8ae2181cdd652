"""Greedy output is that of transformers, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from djl_trtllm.model import Tokenizer
from tests.support import golden
from tests.support.client import lmi
from tests.support.prompts import SIXTEEN, story
from tests.support.server import Server, serving

if TYPE_CHECKING:
    from tests.support.reference import Reference


@pytest.fixture(scope="module")
def expected(golden_tokens: golden.Tokens) -> list[list[int]]:
    """The tokens after each prompt."""
    return golden_tokens[golden.GREEDY]


@pytest.mark.slow
def test_the_golden_file_is_what_transformers_says(reference: Reference, golden_tokens: golden.Tokens) -> None:
    made = golden.make(reference)
    assert made.keys() == golden_tokens.keys()
    for name, tokens in made.items():
        for at, (said, kept) in enumerate(zip(tokens, golden_tokens[name], strict=True)):
            assert said == kept, f"{name}, prompt {at}"


def test_the_prompts_are_of_many_lengths(tokenizer: Tokenizer) -> None:
    lengths = [len(tokenizer.encode(prompt)) for prompt in SIXTEEN]
    assert len(lengths) == 16
    assert min(lengths) <= 3
    assert max(lengths) >= 400
    assert len(set(lengths)) >= 12


@pytest.mark.slow
def test_greedy_alone_equals_transformers(server: Server, expected: list[list[int]]) -> None:
    for prompt, ids in zip(SIXTEEN, expected, strict=True):
        assert server.token_ids(prompt, max_new_tokens=golden.NEW_TOKENS) == ids, prompt


def test_greedy_among_sixteen_equals_transformers(server: Server, expected: list[list[int]]) -> None:
    answers = server.together([lmi(prompt, stream=True, max_new_tokens=golden.NEW_TOKENS) for prompt in SIXTEEN])
    for prompt, ids, answer in zip(SIXTEEN, expected, answers, strict=True):
        assert answer.token_ids == ids, prompt


@pytest.mark.slow
def test_text_equals_transformers_decoding(server: Server, reference: Reference, expected: list[list[int]]) -> None:
    for prompt, ids in zip(SIXTEEN, expected, strict=True):
        text = reference.tokenizer.decode(reference.ids(prompt) + ids, skip_special_tokens=True)
        answer = server.answer(prompt, max_new_tokens=golden.NEW_TOKENS, return_full_text=True)
        assert answer["generated_text"] == text


# -- log-probabilities -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exact(model: Path, scratch: Path) -> Iterator[Server]:
    """A server whose KV cache rounds nothing."""
    with serving(
        model,
        scratch,
        OPTION_KV_CACHE_DTYPE="fp32",
        OPTION_MAX_INPUT_LEN="2560",
        OPTION_MAX_TOKENS_IN_PAGED_KV_CACHE="16384",
    ) as started:
        yield started


def deviations(server: Server, reference: Reference, prompt: str, **parameters: Any) -> list[float]:
    """How far the log-probability of each generated token is from transformers'."""
    tokens = server.answer(prompt, **parameters)["details"]["tokens"]
    expected = reference.logprobs(reference.ids(prompt), [token["id"] for token in tokens])
    return [abs(token["log_prob"] - value) for token, value in zip(tokens, expected, strict=True)]


@pytest.mark.slow
def test_logprobs_equal_transformers_log_softmax(exact: Server, reference: Reference) -> None:
    for prompt in SIXTEEN:
        assert max(deviations(exact, reference, prompt, max_new_tokens=32)) < 1e-3


@pytest.mark.slow
def test_logprobs_do_not_drift_with_the_position(exact: Server, reference: Reference) -> None:
    prompt = story(110)
    assert len(reference.ids(prompt)) > 1500
    assert max(deviations(exact, reference, prompt, max_new_tokens=32)) < 1e-3


@pytest.mark.slow
def test_a_16_bit_cache_changes_logprobs_little(server: Server, reference: Reference) -> None:
    for prompt in (*SIXTEEN, story(110)):
        assert max(deviations(server, reference, prompt, max_new_tokens=32)) < 3e-2


@pytest.mark.slow
def test_logprobs_of_sampled_tokens_are_those_before_temperature(exact: Server, reference: Reference) -> None:
    sampling = {"do_sample": True, "temperature": 1.7, "top_k": 50, "repetition_penalty": 1.2, "seed": 11}
    assert max(deviations(exact, reference, SIXTEEN[0], max_new_tokens=32, **sampling)) < 1e-3
