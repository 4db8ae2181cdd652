from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.backends.tensorrt_llm.sampling import guide_arguments, sampling_arguments
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Guide, GuideKind, Sampling

PLAIN = {"max_tokens": 9, "detokenize": False}
CHOICE = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": None}
BEAMS = {"use_beam_search": True, "n": 3, "best_of": 3, "length_penalty": 1.0, "early_stopping": 0}
KEPT = {"include_stop_str_in_output": True}


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({}, {}),
        ({"temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 3}, {}),  # greedy all the same
        ({"do_sample": True}, CHOICE),
        (
            {"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 2**63},
            {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 2**63},
        ),
        ({"min_new_tokens": 4}, {"min_tokens": 4}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
        ({"frequency_penalty": -0.5}, {"frequency_penalty": -0.5}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"logprobs": True}, {"logprobs": 1}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"min_p": 0.1}, {"min_p": 0.1}),
        ({"no_repeat_ngram_size": 3}, {"no_repeat_ngram_size": 3}),
        ({"beam_width": 2}, {**BEAMS, "n": 2, "best_of": 2}),
        ({"beam_width": 3}, BEAMS),
        (
            {"beam_width": 3, "length_penalty": 0.0, "early_stopping": True, "beam_search_diversity_rate": 0.5},
            {**BEAMS, "length_penalty": 0.0, "early_stopping": 1, "beam_search_diversity_rate": 0.5},
        ),
        ({"stop_token_ids": [2, 3]}, {"stop_token_ids": [2, 3], **KEPT}),
        ({"stop": ["\n\n", "end"]}, {"stop": ["\n\n", "end"], **KEPT}),
        ({"bad": ["wolf"]}, {"bad": ["wolf"]}),
    ],
)
def test_every_parameter_is_an_argument_and_neutral_ones_are_none(
    fields: dict[str, Any], added: dict[str, Any]
) -> None:
    sampling = {name: value for name, value in fields.items() if name in Sampling.__struct_fields__}
    others = {name: value for name, value in fields.items() if name not in sampling}
    assert sampling_arguments(Submit(1, [5], Sampling(9, **sampling), **others)) == PLAIN | added


def test_every_field_of_a_request_is_covered_above() -> None:
    cases = test_every_parameter_is_an_argument_and_neutral_ones_are_none.pytestmark[0].args[1]
    tried = {name for fields, _ in cases for name in fields} | {"max_new_tokens"}
    assert tried >= set(Sampling.__struct_fields__) - {"n", "best_of"}
    assert tried >= set(Submit.__struct_fields__) - {
        "request_id",
        "prompt_ids",
        "sampling",
        "guide",
        "adapter",
        "origin",
    }


@pytest.mark.parametrize(
    ("guide", "arguments"),
    [
        (Guide(GuideKind.JSON_OBJECT), {"json_object": True}),
        (Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}'), {"json": '{"type": "object"}'}),
        (Guide(GuideKind.REGEX, "a+"), {"regex": "a+"}),
        (Guide(GuideKind.GRAMMAR, "root ::= a"), {"grammar": "root ::= a"}),
    ],
)
def test_a_guide_is_one_argument(guide: Guide, arguments: dict[str, Any]) -> None:
    assert guide_arguments(guide) == arguments


def test_arguments_are_fresh_for_each_request() -> None:
    request = Submit(1, [5], Sampling(9), stop_token_ids=[2], stop=["end"], bad=["wolf"])
    first, second = sampling_arguments(request), sampling_arguments(request)
    assert all(first[name] is not second[name] for name in ("stop_token_ids", "stop", "bad"))


@pytest.mark.parametrize(("beam_width", "asked"), [(1, 1), (3, 0)])
def test_beams_ask_for_log_probabilities_in_the_samplers_own_way(beam_width: int, asked: int) -> None:
    request = Submit(1, [5], Sampling(9, beam_width=beam_width), logprobs=True)
    assert sampling_arguments(request, beam_logprobs=0)["logprobs"] == asked
