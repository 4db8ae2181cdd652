from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.tgi.parse import FIELDS, PARAMETERS, parse
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling
from tests.api.scripts import EOS, answer, several
from tests.api.tables import check_tables


def read(path: str = "/generate", **body: Any) -> Call:
    return parse(RawRequest(orjson.dumps(body), {}, path), Options())


def test_inputs_alone_are_100_greedy_tokens() -> None:
    call = read(inputs="a wolf")
    assert call.requests == (GenerationRequest(prompt="a wolf", default_new_tokens=100),)
    assert not call.encoder.stream and not call.encoder.wants_prompt_tokens


@pytest.mark.parametrize(
    ("path", "stream", "streams"),
    [
        ("/generate", True, False),
        ("/generate_stream", False, True),
        ("/", True, True),
        ("/", False, False),
    ],
)
def test_the_path_decides_and_on_the_root_the_field(path: str, stream: bool, streams: bool) -> None:
    assert read(path, inputs="a", stream=stream).encoder.stream is streams


def test_every_parameter_of_tgi_has_its_place() -> None:
    grammar = {"type": "regex", "value": "a+"}
    parameters: dict[str, Any] = {
        "temperature": 0.5,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.5,
        "top_k": 5,
        "top_p": 0.5,
        "do_sample": True,
        "max_new_tokens": 7,
        "stop": ["###"],
        "truncate": 9,
        "seed": 3,
        "details": True,
        "return_full_text": True,
        "decoder_input_details": True,
        "grammar": grammar,
        "adapter_id": "french",
        "watermark": False,
        "typical_p": None,
        "top_n_tokens": 0,
    }
    call = read(inputs="a", parameters=parameters)
    sampling = Sampling(
        max_new_tokens=7,
        do_sample=True,
        temperature=0.5,
        top_k=5,
        top_p=0.5,
        repetition_penalty=1.5,
        frequency_penalty=0.5,
        seed=3,
    )
    assert call.requests == (
        GenerationRequest(
            prompt="a",
            sampling=sampling,
            stop=("###",),
            logprobs=True,
            asks_logprobs=True,
            truncate=9,
            guide=Guide(GuideKind.REGEX, "a+"),
            adapter="french",
            default_new_tokens=100,
        ),
    )
    assert call.encoder.wants_prompt_tokens


def test_best_of_returns_them_all_ranked() -> None:
    sampling = read(inputs="a", parameters={"best_of": 2, "do_sample": True}).requests[0].sampling
    assert (sampling.n, sampling.best_of) == (2, 2)


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({}, InvalidRequestError, "'inputs' is null"),
        ({"inputs": ""}, InvalidRequestError, "not empty"),
        ({"inputs": ["a"]}, InvalidRequestError, "'inputs' is"),
        ({"inputs": "a", "parameters": []}, InvalidRequestError, "expected an object"),
        ({"inputs": "a", "max_new_tokens": 3}, InvalidRequestError, "in 'parameters'"),
        ({"inputs": "a", "parameters": {"stream": True}}, InvalidRequestError, "beside 'parameters'"),
        ({"inputs": "a", "parameters": {"watermark": True}}, UnsupportedParameterError, "watermark"),
        ({"inputs": "a", "parameters": {"top_n_tokens": 2}}, UnsupportedParameterError, "top_n_tokens"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        read(**body)


@pytest.mark.parametrize("parameters", [{"best_of": 2}, {"decoder_input_details": True}])
def test_what_a_stream_cannot_have_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="in a stream"):
        read("/generate_stream", inputs="a", parameters=parameters)


def test_the_tokens_of_the_prompt_come_with_details() -> None:
    encoder = read(inputs="a", parameters={"decoder_input_details": True}).encoder
    assert encoder.wants_prompt_tokens
    assert "details" in json.loads(answer(encoder, EOS))
    assert "details" not in json.loads(answer(read(inputs="a").encoder, EOS))


def test_a_body_is_an_object() -> None:
    with pytest.raises(InvalidRequestError, match="expected a JSON object with 'inputs'"):
        parse(RawRequest(b"3", {}, "/"), Options())


def test_the_tables() -> None:
    check_tables("tgi", fields=FIELDS, parameters=PARAMETERS)


def test_the_root_answers_in_a_list_and_all_sequences_of_best_of_are_shown() -> None:
    for path in ("/", "/generate"):
        shown = json.loads(
            answer(read(path, inputs="a", parameters={"best_of": 2, "do_sample": True}).encoder, several(2))
        )
        assert isinstance(shown, list) is (path == "/")
        best = shown[0] if path == "/" else shown
        assert [each["generated_text"] for each in best["details"]["best_of_sequences"]] == ["10 11"]


def test_unknown_names_are_parameters_or_fields() -> None:
    with pytest.raises(InvalidRequestError, match='unknown parameter "hen"'):
        read(inputs="a", parameters={"hen": 1})
    with pytest.raises(InvalidRequestError, match='unknown field "hen"'):
        read(inputs="a", hen=1)
    with pytest.raises(InvalidRequestError, match=r"'decoder_input_details' is true: expected false in a stream$"):
        read("/generate_stream", inputs="a", parameters={"decoder_input_details": True})


def test_details_are_shown_if_they_are_wanted() -> None:
    for parameters, shown in (({}, False), ({"details": True}, True), ({"details": False}, False)):
        answered = json.loads(answer(read(inputs="a", parameters=parameters).encoder, EOS))
        assert ("details" in answered) is shown
