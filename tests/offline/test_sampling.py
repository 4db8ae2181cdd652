"""TensorRT-LLM's sampling parameters as those of a request."""

from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.offline import GuidedDecodingParams, SamplingParams
from djl_trtllm.request import GenerationRequest, Guide, GuideKind


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.7, "top_k": 1}, True),
        ({"temperature": 0.7, "top_p": 0.0}, True),
        ({"temperature": 1.0}, False),
        ({"top_p": 1.0}, False),
        ({"top_k": 0}, False),
        ({"seed": 3}, True),
    ],
)
def test_greedy_is_what_tensorrt_llm_takes_for_greedy(fields: dict[str, float], greedy: bool) -> None:
    sampling = SamplingParams(**fields).template().sampling  # type: ignore[arg-type]
    assert sampling.do_sample is not greedy


def test_parameters_become_those_of_the_request() -> None:
    request = SamplingParams(
        n=2,
        best_of=3,
        max_tokens=None,
        min_tokens=4,
        temperature=1.5,
        top_p=0.9,
        top_k=40,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        ignore_eos=True,
        logprobs=1,
        truncate_prompt_tokens=9,
    ).template()
    sampling = request.sampling
    assert (sampling.n, sampling.best_of, sampling.max_new_tokens, sampling.min_new_tokens) == (2, 3, 0, 4)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (1.5, 0.9, 40, 5)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (sampling.do_sample, sampling.ignore_eos) == (True, True)
    assert (request.stop, request.stop_token_ids, request.logprobs, request.truncate) == (("a", "b"), (1, 2), True, 9)
    assert (request.prompt, request.prompt_ids, request.messages) == (None, None, None)


def test_n_sequences_are_not_ranked_unless_more_are_generated() -> None:
    assert SamplingParams(n=3, temperature=1.0).template().sampling.best_of is None
    assert SamplingParams(n=3, best_of=3, temperature=1.0).template().sampling.best_of is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -1}, "'temperature' is -1"),
        ({"top_p": 1.5}, "'top_p' is 1.5"),
        ({"max_tokens": 0}, "'max_tokens' is 0"),
        ({"max_tokens": "9"}, "'max_tokens' is \"9\""),
        ({"n": 2}, "greedy decoding gives the same"),
        ({"best_of": 2}, "greedy decoding gives the same"),
        ({"n": 3, "best_of": 2, "temperature": 1}, "'best_of' is 2"),
        ({"stop": ""}, "'stop' is"),
        ({"n": 1025, "temperature": 1}, "1025 sequences: .* up to 1024"),
        ({"best_of": 1025, "temperature": 1}, "1025 sequences: .* up to 1024"),
        ({"min_tokens": 4, "max_tokens": 3}, "'min_tokens' is 4: expected at most 'max_tokens', which is 3"),
        ({"n": 0}, "'n' is 0"),
        ({"bad": 3.5}, "'bad' is 3.5"),
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert "payload" not in str(refused.value)


def test_more_log_probabilities_than_there_are_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameterError, match="'logprobs' is 5"):
        SamplingParams(logprobs=5)


def test_what_it_does_not_have_is_no_argument() -> None:
    with pytest.raises(TypeError, match="detokenize"):
        SamplingParams(detokenize=False)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "guide"),
    [
        ({"json": {"type": "object"}}, Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')),
        ({"regex": "a+"}, Guide(GuideKind.REGEX, "a+")),
        ({"grammar": "root ::= x"}, Guide(GuideKind.GRAMMAR, "root ::= x")),
        ({"json_object": True}, Guide(GuideKind.JSON_OBJECT)),
    ],
)
def test_a_guide_is_that_of_the_request(fields: dict[str, Any], guide: Guide) -> None:
    assert SamplingParams(guided_decoding=GuidedDecodingParams(**fields)).template().guide == guide


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "json_object": True}])
def test_there_is_one_guide(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        GuidedDecodingParams(**fields)


BEAMS: dict[str, Any] = {"length_penalty": 0.5, "early_stopping": 1, "beam_search_diversity_rate": 0.25}


@pytest.mark.parametrize(("fields", "width"), [({"n": 2, "best_of": 4}, 4), ({"n": 3}, 3), ({"best_of": 2}, 2)])
def test_beams_are_those_that_are_generated(fields: dict[str, Any], width: int) -> None:
    sampling = SamplingParams(use_beam_search=True, temperature=1.0, **fields, **BEAMS).template().sampling
    assert (sampling.beam_width, sampling.n, sampling.best_of) == (width, fields.get("n", 1), None)
    assert (sampling.length_penalty, sampling.early_stopping, sampling.beam_search_diversity_rate) == (0.5, True, 0.25)
    assert not sampling.do_sample


def test_every_field_of_a_request_can_be_set() -> None:
    params = SamplingParams(
        temperature=0.5, best_of=2, bad="wolf", min_p=0.25, no_repeat_ngram_size=3, logprobs=0,
        guided_decoding=GuidedDecodingParams(regex="a"), stop="x", stop_token_ids=[3], truncate_prompt_tokens=4,
    )  # fmt: skip
    request = params.template()
    assert (request.sampling.min_p, request.sampling.no_repeat_ngram_size, request.bad) == (0.25, 3, ("wolf",))
    assert (request.logprobs, request.needs_logprobs, request.asks_logprobs) == (True, True, False)
    set_by_llm = {"prompt", "prompt_ids", "messages", "template", "adapter", "asks_logprobs"}
    of_openai = {"top_logprobs", "shown_tokens", "guide_from"}
    neutral = GenerationRequest()
    unset = {name for name in GenerationRequest.__struct_fields__ if getattr(request, name) == getattr(neutral, name)}
    assert unset == set_by_llm | of_openai


def test_defaults_are_those_of_tensorrt_llm() -> None:
    assert SamplingParams().template() == GenerationRequest(default_new_tokens=32)
    assert SamplingParams(max_tokens=None).template() == GenerationRequest()


@pytest.mark.parametrize(("n", "best_of", "ranked"), [(1, None, None), (2, None, None), (1, 2, 2), (1024, None, None)])
def test_sequences_are_ranked_only_where_some_are_left_out(n: int, best_of: int | None, ranked: int | None) -> None:
    request = SamplingParams(n=n, best_of=best_of, temperature=1.0).template()
    assert (request.sampling.best_of, request.needs_logprobs) == (ranked, ranked is not None)
