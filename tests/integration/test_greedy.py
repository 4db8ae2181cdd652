"""Greedy output is that of transformers, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import Server, body, serving
from tests.support.prompts import SIXTEEN, story
from tests.support.reference import Reference

NEW_TOKENS = 64


@pytest.fixture(scope="module")
def expected(reference: Reference) -> list[list[int]]:
    return [reference.greedy(reference.ids(prompt), NEW_TOKENS) for prompt in SIXTEEN]


def explained(reference: Reference, prompt: str, expected: list[int], given: list[int]) -> str:
    """Where two outputs part, and how close the choice was."""
    at = next((at for at, (one, other) in enumerate(zip(expected, given, strict=False)) if one != other), len(given))
    margin = reference.margins(reference.ids(prompt), expected)[min(at, len(expected) - 1)]
    return f"{prompt[:40]!r} parts at token {at}, where the second best token was {margin:.5f} behind"


def test_the_prompts_are_of_many_lengths(reference: Reference) -> None:
    lengths = [len(reference.ids(prompt)) for prompt in SIXTEEN]
    assert len(lengths) == 16
    assert min(lengths) <= 3
    assert max(lengths) >= 400
    assert len(set(lengths)) >= 12


def test_greedy_alone_equals_transformers(server: Server, reference: Reference, expected: list[list[int]]) -> None:
    for prompt, ids in zip(SIXTEEN, expected, strict=True):
        given = server.token_ids(prompt, max_new_tokens=NEW_TOKENS)
        assert given == ids, explained(reference, prompt, ids, given)


def test_greedy_among_sixteen_equals_transformers(
    server: Server, reference: Reference, expected: list[list[int]]
) -> None:
    answers = server.together([body(prompt, stream=True, max_new_tokens=NEW_TOKENS) for prompt in SIXTEEN])
    for prompt, ids, answer in zip(SIXTEEN, expected, answers, strict=True):
        assert answer.token_ids == ids, explained(reference, prompt, ids, answer.token_ids)


def test_text_equals_transformers_decoding(server: Server, reference: Reference, expected: list[list[int]]) -> None:
    for prompt, ids in zip(SIXTEEN, expected, strict=True):
        text = reference.tokenizer.decode(reference.ids(prompt) + ids, skip_special_tokens=True)
        answer = server.generate(prompt, max_new_tokens=NEW_TOKENS, return_full_text=True)
        assert answer["generated_text"] == text


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
    tokens = server.generate(prompt, **parameters)["details"]["tokens"]
    expected = reference.logprobs(reference.ids(prompt), [token["id"] for token in tokens])
    return [abs(token["log_prob"] - value) for token, value in zip(tokens, expected, strict=True)]


def test_logprobs_equal_transformers_log_softmax(exact: Server, reference: Reference) -> None:
    for prompt in SIXTEEN:
        assert max(deviations(exact, reference, prompt, max_new_tokens=32)) < 1e-3


def test_logprobs_do_not_drift_with_the_position(exact: Server, reference: Reference) -> None:
    prompt = story(110)
    assert len(reference.ids(prompt)) > 1500
    assert max(deviations(exact, reference, prompt, max_new_tokens=32)) < 1e-3


def test_a_16_bit_cache_changes_logprobs_little(server: Server, reference: Reference) -> None:
    for prompt in (*SIXTEEN, story(110)):
        assert max(deviations(server, reference, prompt, max_new_tokens=32)) < 3e-2


def test_logprobs_of_sampled_tokens_are_those_before_temperature(exact: Server, reference: Reference) -> None:
    sampling = {"do_sample": True, "temperature": 1.7, "top_k": 50, "repetition_penalty": 1.2, "seed": 11}
    assert max(deviations(exact, reference, SIXTEEN[0], max_new_tokens=32, **sampling)) < 1e-3
