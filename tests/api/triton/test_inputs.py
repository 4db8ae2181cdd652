from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.parameters import Problems
from djl_trtllm.api.triton.inputs import (
    BLS_INPUTS,
    FIELDS,
    GENERATE_FIELDS,
    INPUTS,
    InferenceRequest,
    input_named,
    read_request,
)
from djl_trtllm.config import Options
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling
from tests.api.scripts import check_golden
from tests.api.tables import check_tables
from tests.api.triton.played import PlayedModel

DOCUMENTED: dict[str, Any] = {
    "text_input": "What is machine learning?",
    "max_tokens": 20,
    "bad_words": "",
    "stop_words": "",
    "pad_id": 2,
    "end_id": 2,
}
"""The request of the workflow for Llama."""

HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_return_sequences": (2, {"n": 2}),
    "top_k": (5, {"top_k": 5, "do_sample": True}),
    "top_p": (0.5, {"top_p": 0.5, "do_sample": True}),
    "temperature": (0.5, {"temperature": 0.5, "do_sample": True}),
    "length_penalty": (0.5, {"length_penalty": 0.5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "min_length": (3, {"min_new_tokens": 3}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (0.5, {"frequency_penalty": 0.5}),
    "random_seed": (2**64 - 1, {"seed": 2**64 - 1}),
    "beam_width": (2, {"beam_width": 2, "n": 2}),
}
"""An input, a value of it, and the sampling that it makes."""

REFUSED: dict[str, Any] = {
    "decoder_text_input": "a",
    "return_context_logits": True,
    "return_generation_logits": True,
    "return_perf_metrics": True,
    "prompt_embedding_table": [0.5],
    "prompt_table_extra_id": 1,
    "prompt_vocab_size": 1,
    "embedding_bias_words": ["a"],
    "embedding_bias_weights": [0.5],
    "lora_weights": [0.5],
    "lora_config": [1, 2, 3],
}
"""Inputs that no engine here has, with a value that would have an effect."""

ELSEWHERE = {
    *("text_input", "max_tokens", "bad_words", "stop_words", "exclude_input_in_output", "end_id", "pad_id"),
    *("return_log_probs", "stream", "lora_task_id", "guided_decoding_guide_type", "guided_decoding_guide"),
}
"""Inputs that have tests of their own."""


def read(values: dict[str, Any] | None = None, **options: Any) -> InferenceRequest:
    problems = Problems()
    given = {"text_input": "a wolf", "max_tokens": 7} | (values or {})
    request = read_request(given, PlayedModel(Options(**options)), problems)
    problems.raise_any()
    return request


def problems_of(values: dict[str, Any], **options: Any) -> Problems:
    problems = Problems()
    read_request(values, PlayedModel(Options(**options)), problems)
    return problems


def test_there_are_34_inputs_and_6_more_and_each_has_a_test() -> None:
    names = [each.name for each in INPUTS]
    assert len(set(names)) == len(names) == 34
    assert set(names) == {*HONOURED, *REFUSED, *ELSEWHERE}
    assert len({each.name for each in (*INPUTS, *BLS_INPUTS)}) == 40
    assert [each.name for each in INPUTS if not each.optional] == ["text_input", "max_tokens"]
    assert input_named("text_input") is INPUTS[0]
    assert input_named("image_input") is BLS_INPUTS[0]
    assert input_named("hen") is None


def test_the_documents_request_asks_for_20_greedy_tokens() -> None:
    request = read(DOCUMENTED)
    sampling = Sampling(max_new_tokens=20)
    assert request == InferenceRequest(
        GenerationRequest(prompt=DOCUMENTED["text_input"], sampling=sampling), 1, False, False, None
    )


@pytest.mark.parametrize("name", HONOURED)
def test_an_input_has_its_effect(name: str) -> None:
    value, expected = HONOURED[name]
    request = read({name: value})
    assert request.generation.sampling == Sampling(max_new_tokens=7, **expected)
    assert read({name: [value]}) == request


@pytest.mark.parametrize("name", REFUSED)
def test_an_input_is_refused_by_name(name: str) -> None:
    problems = problems_of({"text_input": "a", "max_tokens": 7, name: REFUSED[name]})
    assert not problems.invalid
    assert len(problems.unsupported) == 1 and f"'{name}' is" in problems.unsupported[0]


@pytest.mark.parametrize(
    "values",
    [
        {"decoder_text_input": ""},
        {"return_context_logits": False, "return_generation_logits": [False], "return_perf_metrics": False},
        {"prompt_embedding_table": [], "prompt_table_extra_id": 0, "prompt_vocab_size": [0]},
        {"embedding_bias_words": "", "embedding_bias_weights": []},
        {"embedding_bias_words": [""], "embedding_bias_weights": [0.0]},
        {"lora_weights": [], "lora_config": []},
        {"num_draft_tokens": 0, "use_draft_logits": False, "image_url_input": ""},
        {"sequence_id": 0, "sequence_start": False, "sequence_end": False, "priority": 0, "timeout": 0},
        {"accumulate_tokens": True, "pad_id": 3, "return_kv_cache_reuse_stats": False},
        {"top_p": 0.0, "temperature": 1.0, "top_k": 0, "beam_width": 1, "num_return_sequences": 1},
        {"end_id": 2, "stop_words": [""], "bad_words": [[], ""][1]},
    ],
)
def test_what_asks_for_nothing_changes_nothing(values: dict[str, Any]) -> None:
    assert read(values) == read()


@pytest.mark.parametrize("none", ["", [], [""], ["", ""], None])
def test_empty_words_mean_none(none: Any) -> None:
    request = read({"stop_words": none, "bad_words": none})
    assert (request.generation.stop, request.generation.bad) == ((), ())


def test_words_are_a_text_or_a_list() -> None:
    request = read({"stop_words": ["###", "", "hen"], "bad_words": "fox"})
    assert (request.generation.stop, request.generation.bad) == (("###", "hen"), ("fox",))


@pytest.mark.parametrize(("end_id", "ids"), [(-1, ()), (5, (5,)), (0, (0,)), (100, ()), (7, None)])
def test_end_id_takes_the_place_of_the_models_own(end_id: int, ids: tuple[int, ...] | None) -> None:
    generation = read({"end_id": end_id}).generation
    if ids is None:
        assert generation == read().generation
    else:
        assert (generation.sampling.ignore_eos, generation.stop_token_ids) == (True, ids)


def test_log_probabilities_are_wanted_or_not() -> None:
    request = read({"return_log_probs": True})
    assert request.logprobs and request.generation.logprobs and request.generation.needs_logprobs
    assert not read({"return_log_probs": False}).generation.logprobs


def test_the_prompt_is_shown_only_if_the_request_says_so() -> None:
    assert read({"exclude_input_in_output": False}).prompt
    assert not read({"exclude_input_in_output": True}).prompt
    assert not read().prompt


def test_an_adapter_is_named_by_its_task() -> None:
    assert read({"lora_task_id": 3}).generation.adapter == "3"
    assert read({"adapters": "french"}).generation.adapter == "french"


@pytest.mark.parametrize(
    ("kind", "text", "guide"),
    [
        ("json_schema", '{"type": "object"}', Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')),
        ("json", '{"type": "object"}', Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')),
        ("regex", "a+", Guide(GuideKind.REGEX, "a+")),
        ("ebnf_grammar", "root ::= 'a'", Guide(GuideKind.GRAMMAR, "root ::= 'a'")),
    ],
)
def test_guides(kind: str, text: str, guide: Guide) -> None:
    values = {"guided_decoding_guide_type": kind, "guided_decoding_guide": [text]}
    assert read(values).generation.guide == guide


def test_no_guide_is_none() -> None:
    assert read({"guided_decoding_guide_type": "", "guided_decoding_guide": ""}).generation.guide is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'text_input' is required: expected a text"),
        ({"text_input": "", "max_tokens": 3}, "'text_input' is required"),
        ({"text_input": "a"}, "'max_tokens' is required: expected the number of tokens"),
        ({"text_input": "a", "max_tokens": 0}, "'max_tokens' is 0: expected an integer from 1"),
        ({"text_input": "a", "max_tokens": 2**60}, "'max_tokens' is"),
        ({"text_input": "a", "max_tokens": [3, 4]}, "'max_tokens' has 2 values: expected one"),
        ({"text_input": [], "max_tokens": 3}, "'text_input' has 0 values"),
        ({"text_input": 5, "max_tokens": 3}, "'text_input' is 5: expected a string"),
        ({"text_input": "a", "max_tokens": 3, "top_p": 2}, "'top_p' is 2"),
        ({"text_input": "a", "max_tokens": 3, "top_p": "x"}, "'top_p' is"),
        ({"text_input": "a", "max_tokens": 3, "end_id": -2}, "'end_id' is -2"),
        ({"text_input": "a", "max_tokens": 3, "top_q": 2}, 'unknown input "top_q", did you mean'),
        ({"text_input": "a", "max_tokens": 3, "stop_words": [1]}, "'stop_words' is [1]"),
        ({"text_input": "a", "max_tokens": 3, "stop_words": ["a"] * 65}, "'stop_words' is"),
        ({"text_input": "a", "max_tokens": 3, "stop_words": [""] * 1025}, "'stop_words' is"),
        ({"text_input": "a", "max_tokens": 3, "guided_decoding_guide": "a"}, "'guided_decoding_guide_type' is \"\""),
        (
            {
                "text_input": "a",
                "max_tokens": 3,
                "guided_decoding_guide_type": "json",
                "guided_decoding_guide": "{",
            },
            "'guided_decoding_guide' is \"{\": expected a JSON schema",
        ),
        ({"text_input": "a", "max_tokens": 3, "stream": True, "beam_width": 2}, "'beam_width' is above 1"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    assert any(message in problem for problem in problems_of(values).invalid)


@pytest.mark.parametrize(("decoupled", "refused"), [(None, False), (True, False), (False, True)])
def test_a_model_that_is_not_decoupled_has_no_streams(decoupled: bool | None, refused: bool) -> None:
    problems = problems_of({"text_input": "a", "max_tokens": 3, "stream": True}, decoupled=decoupled)
    expected = ["Streaming is only supported if model is deployed using decoupled mode."] * refused
    assert problems.invalid == expected
    assert not problems_of({"text_input": "a", "max_tokens": 3, "stream": False}, decoupled=decoupled).invalid


def test_the_tables() -> None:
    check_tables("triton", fields=FIELDS)
    lines = [f"{each.name} {each.datatype} {each.dims}{' optional' * each.optional}" for each in (*INPUTS, *BLS_INPUTS)]
    check_golden("triton-inputs", ("\n".join(lines) + "\n").encode())


def test_a_client_may_ask_for_an_empty_last_response() -> None:
    assert not read().empty_final_response
    assert read({"triton_enable_empty_final_response": True}).empty_final_response


def test_any_input_of_generate_may_be_in_a_list() -> None:
    schema = GENERATE_FIELDS.schema()
    assert schema["properties"].keys() == {*FIELDS.rows, "id", "parameters"}
    assert schema["properties"]["top_k"]["anyOf"] == [FIELDS.schema()["properties"]["top_k"], {"type": "array"}]
    assert (schema["properties"]["id"], schema["additionalProperties"]) == ({}, {"type": "null"})
