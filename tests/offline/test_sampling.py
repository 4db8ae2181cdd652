"""TensorRT-LLM's sampling parameters as those of a request."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.offline import GuidedDecodingParams, SamplingParams


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
    ],
)
def test_wrong_parameters_are_refused_when_they_are_made(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as refused:
        SamplingParams(**fields)  # type: ignore[arg-type]
    assert "payload" not in str(refused.value)


def test_more_log_probabilities_than_there_are_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedParameterError, match="'top_logprobs' is 5"):
        SamplingParams(logprobs=5)


def test_what_it_does_not_have_is_no_argument() -> None:
    with pytest.raises(TypeError, match="detokenize"):
        SamplingParams(detokenize=False)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("fields", "parameters"),
    [
        ({"json": {"type": "object"}}, {"guided_json": {"type": "object"}}),
        ({"regex": "a+"}, {"guided_regex": "a+"}),
        ({"grammar": "root ::= x"}, {"guided_grammar": "root ::= x"}),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
    ],
)
def test_a_guide_is_one_of_the_lmi_schemas(fields: dict[str, object], parameters: dict[str, object]) -> None:
    assert GuidedDecodingParams(**fields).parameters() == parameters  # type: ignore[arg-type]


def test_there_is_one_guide() -> None:
    for guide in (GuidedDecodingParams(), GuidedDecodingParams(regex="a", json_object=True)):
        with pytest.raises(InvalidRequestError, match="exactly one"):
            guide.parameters()
