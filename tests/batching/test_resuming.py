"""Which sequences can go on in another engine process, and with what message."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from djl_trtllm.batching.resuming import can_resume, resumed
from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.request import Adapter, Guide, GuideKind, Sampling

LIMITS = Limits(max_sequences=4, kv_blocks=0, block_size=32, max_seq_len=100)


def message(sampling: dict[str, Any] | None = None, **fields: Any) -> Submit:
    return Submit(7, [1, 2, 3], Sampling(**{"max_new_tokens": 20, **(sampling or {})}), **fields)


STATEFUL = [
    message({"repetition_penalty": 1.1}),
    message({"presence_penalty": 0.5}),
    message({"frequency_penalty": -0.5}),
    message({"no_repeat_ngram_size": 2}),
    message({"min_new_tokens": 6}),
    message({"beam_width": 2}),
    message(guide=Guide(GuideKind.JSON_OBJECT)),
    message(bad=["wolf"]),
]


@pytest.mark.parametrize("one", STATEFUL, ids=str)
def test_what_an_engine_remembers_beside_the_tokens_would_be_lost(one: Submit) -> None:
    assert can_resume(one, 0, LIMITS)
    assert not can_resume(one, 5, LIMITS)


def test_a_minimum_length_is_no_matter_once_it_is_reached() -> None:
    one = message({"min_new_tokens": 6})
    assert can_resume(one, 6, LIMITS)
    assert resumed(one, [9] * 6).sampling.min_new_tokens == 0


@pytest.mark.parametrize(
    "one",
    [
        message(),
        message({"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "seed": 3}),
        message({"ignore_eos": True}),
        message(stop=["wolf"], stop_token_ids=[2], logprobs=True, top_logprobs=3),
        message(adapter=Adapter("tales", 1, "/tales")),
    ],
    ids=str,
)
def test_everything_else_goes_on(one: Submit) -> None:
    assert can_resume(one, 5, LIMITS)


@pytest.mark.parametrize(("longest", "possible"), [(0, True), (8, True), (7, False)])
def test_the_new_prompt_has_to_be_short_enough_for_the_engine(longest: int, possible: bool) -> None:
    assert can_resume(message(), 5, replace(LIMITS, max_prompt_len=longest)) is possible


def test_it_goes_on_after_the_tokens_that_it_has() -> None:
    one = message({"ignore_eos": True}, stop=["wolf"], logprobs=True)
    assert resumed(one, []) == one
    assert resumed(replace(one, prompt_ids=array("i", [1, 2, 3])), []) == one  # as a list
    new = resumed(one, [4, 5])
    assert new.prompt_ids == [1, 2, 3, 4, 5]
    assert new.sampling == replace(one.sampling, max_new_tokens=18)
    assert replace(new, prompt_ids=one.prompt_ids, sampling=one.sampling) == one


def test_a_seeded_one_does_not_draw_the_numbers_of_its_beginning_again() -> None:
    one = message({"do_sample": True, "seed": 3})
    seeds = [resumed(one, [9] * generated).sampling.seed for generated in range(5)]
    assert seeds[0] == 3
    assert len(set(seeds)) == 5
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)
    assert resumed(one, [9, 9]) == resumed(one, [9, 9])
    neighbour = message({"do_sample": True, "seed": 4})
    assert resumed(neighbour, [9]).sampling.seed not in seeds
