"""The requests of a trial."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.finder.load import NEW_TOKENS, Load, prompt_limit, requests_of
from djl_trtllm.service import Model


def test_the_load_is_that_of_the_finder_document() -> None:
    assert (Load().requests, Load().tokens) == (128, 3700)


@pytest.mark.parametrize(
    ("max_input_len", "max_seq_len", "tokens"),
    [(4096, 8192, 3700), (1024, 8192, 1024), (4096, 2048, 2048 - NEW_TOKENS), (4096, 4, 1)],
)
def test_prompts_are_as_long_as_the_engine_takes(max_input_len: int, max_seq_len: int, tokens: int) -> None:
    assert Load().within(max_input_len, max_seq_len) == Load(128, tokens)


def model(gpus: int, *, chunked: bool, tokens: int | None) -> Model:
    options = SimpleNamespace(enable_chunked_prefill=chunked, max_num_tokens=tokens)
    limits: Any = SimpleNamespace(max_input_len=4096)
    return cast(Model, SimpleNamespace(options=options, limits=limits, gpus=gpus))


def test_on_gpus_a_prompt_is_one_iteration_unless_it_is_split() -> None:
    assert prompt_limit(model(1, chunked=False, tokens=1190)) == 1190
    assert prompt_limit(model(1, chunked=True, tokens=1190)) == 4096
    assert prompt_limit(model(1, chunked=False, tokens=50_000)) == 4096
    assert prompt_limit(model(0, chunked=False, tokens=1190)) == 4096
    assert prompt_limit(model(1, chunked=False, tokens=None)) == 4096


def test_prompts_have_tokens_of_the_vocabulary_and_nothing_in_common() -> None:
    requests = list(requests_of(Load(5, 400), 1000))
    prompts = [request.prompt_ids or [] for request in requests]
    assert [len(prompt) for prompt in prompts] == [400] * 5
    assert {token for prompt in prompts for token in prompt} <= set(range(3, 1000))
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 5
    assert {request.sampling.max_new_tokens for request in requests} == {NEW_TOKENS}


def test_every_trial_has_the_same_requests() -> None:
    assert list(requests_of(Load(3, 20), 100)) == list(requests_of(Load(3, 20), 100))


def test_a_vocabulary_of_a_few_tokens_is_enough() -> None:
    assert {token for request in requests_of(Load(2, 9), 2) for token in request.prompt_ids or ()} == {3}
