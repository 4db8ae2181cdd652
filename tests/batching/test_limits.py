"""How long a sequence may be: by the operator's limits, and by the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from djl_trtllm.batching.limits import BatchLimits, SequenceLimits
from djl_trtllm.errors import InvalidRequestError, PromptTooLongError
from djl_trtllm.executor.protocol import Limits
from djl_trtllm.request import GenerationRequest, Sampling

BATCH = BatchLimits(max_batch_size=4, max_queue_size=4, max_input_len=50, max_output_len=20, max_seq_len=60)


def limits(max_seq_len: int = 100, kv_blocks: int = 0, block_size: int = 10) -> SequenceLimits:
    return SequenceLimits(BATCH, Limits(4, kv_blocks, block_size, max_seq_len))


def asking(max_new_tokens: int, truncate: int | None = None, least: int = 0, default: int = 0) -> GenerationRequest:
    sampling = Sampling(max_new_tokens=max_new_tokens, min_new_tokens=least)
    return GenerationRequest(prompt_ids=[5], sampling=sampling, truncate=truncate, default_new_tokens=default)


@pytest.mark.parametrize(("prompt", "tokens"), [(1, 1), (50, 10), (40, 20), (30, 20)])
def test_what_fits_is_kept_as_it_is(prompt: int, tokens: int) -> None:
    ids = list(range(prompt))
    assert limits().fit(asking(tokens), ids) == (ids, tokens)


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [
        (51, 5, "the prompt has 51 tokens, max_input_len is 50: shorten it, or raise option.max_input_len"),
        (
            45,
            16,
            "the prompt has 45 tokens and max_new_tokens is 16; together they may have 60 (max_seq_len): 15 are left "
            "for the output",
        ),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_with_the_numbers(prompt: int, tokens: int, message: str) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        limits().fit(asking(tokens), [5] * prompt)
    assert str(caught.value) == message


def test_more_tokens_than_the_limit_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        limits().fit(asking(21), [5])
    assert not isinstance(caught.value, PromptTooLongError)
    assert str(caught.value) == (
        "the request asks for 21 new tokens, max_output_len is 20: ask for fewer, or raise option.max_output_len"
    )


def test_a_default_that_no_client_asked_for_is_lowered_to_every_limit() -> None:
    assert [limits().fit(asking(0, default=30), [5] * prompt)[1] for prompt in (3, 40, 45)] == [20, 20, 15]
    assert limits().fit(asking(0, default=7), [5])[1] == 7
    assert limits().fit(asking(9, default=7), [5])[1] == 9


def test_no_more_tokens_are_demanded_than_can_be_generated() -> None:
    assert limits().fit(asking(0, least=15), [5] * 45)[1] == 15
    with pytest.raises(InvalidRequestError) as caught:
        limits().fit(asking(0, least=16), [5] * 45)
    assert str(caught.value) == (
        "the request asks for at least 16 new tokens, and it gets 15 at most (max_output_len is 20, max_seq_len 60): "
        "ask for fewer"
    )


@pytest.mark.parametrize(("engine", "left"), [(30, 0), (29, 0)])
def test_a_prompt_that_leaves_no_room_for_a_token_is_refused(engine: int, left: int) -> None:
    with pytest.raises(PromptTooLongError) as caught:
        limits(max_seq_len=engine).fit(asking(0), [5] * 30)
    message = f"the prompt has 30 tokens and max_new_tokens is not set; together they may have {engine} (max_seq_len)"
    assert str(caught.value) == f"{message}: {left} are left for the output"


def test_room_for_one_token_is_enough_where_no_length_is_asked_for() -> None:
    assert limits(max_seq_len=31).fit(asking(0), [5] * 30) == ([5] * 30, 1)


@pytest.mark.parametrize(("engine", "together"), [(40, 40), (60, 60), (61, 60)])
def test_the_smaller_of_both_longest_sequences_counts(engine: int, together: int) -> None:
    at_most, prompt = limits(max_seq_len=engine), [5] * (together - 10)
    assert at_most.fit(asking(10), prompt)[1] == 10
    with pytest.raises(PromptTooLongError, match=f"together they may have {together} "):
        at_most.fit(asking(11), prompt)


def test_no_length_means_what_fits_up_to_max_output_len() -> None:
    assert [limits().fit(asking(0), [5] * prompt)[1] for prompt in (3, 40, 45)] == [20, 20, 15]


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    assert limits().fit(asking(5, truncate=3), list(range(10, 80))) == ([77, 78, 79], 5)
    assert limits().fit(asking(5, truncate=9), [5, 6]) == ([5, 6], 5)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        limits().fit(asking(5), [])


def test_a_sequence_has_the_blocks_of_all_its_tokens_and_one_to_spare() -> None:
    blocks = limits(block_size=10).blocks
    assert [blocks(prompt, new) for prompt, new in ((1, 1), (9, 1), (9, 2), (30, 10), (30, 11))] == [2, 2, 3, 5, 6]


def test_what_never_fits_the_kv_cache_is_refused_with_the_numbers() -> None:
    assert limits(kv_blocks=5).fit(asking(10), [5] * 30)[1] == 10
    with pytest.raises(PromptTooLongError) as caught:
        limits(kv_blocks=4).fit(asking(10), [5] * 30)
    assert str(caught.value).startswith(
        "30 prompt tokens and 10 new tokens need 5 KV cache blocks, the engine has 4: shorten the request, or "
    )
    assert "option.kv_cache_free_gpu_mem_fraction" in str(caught.value)


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    bounded = SequenceLimits(replace(BATCH, vocab_size=100), Limits(4, 0, 10, 100))
    assert bounded.fit(asking(2), [3, 99]) == ([3, 99], 2)
    with pytest.raises(InvalidRequestError, match=r"a token with the id 100, .* its ids end at 99; leave that"):
        bounded.fit(asking(2), [3, 100, 5])
