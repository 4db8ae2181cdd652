from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.openai.dialect import OPENAI
from djl_trtllm.api.openai.parse import read_model_name
from djl_trtllm.api.openai.response import EventEncoder, ObjectEncoder
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GenerationRequest, Guide, GuideKind, Sampling
from djl_trtllm.service import Model
from tests.support.in_process import played_model

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SAMPLED: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "presence_penalty": 0.25,
    "frequency_penalty": 0.75,
    "seed": 9,
    "n": 2,
}


@pytest.fixture
def model(tokenizer: Tokenizer) -> Model:
    return played_model(tokenizer)


def parse(model: Model, path: str, **body: Any) -> Call:
    return OPENAI.parse(RawRequest(orjson.dumps(body), {}, path), model)


def refusal(model: Model, path: str, **body: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        parse(model, path, **body)
    return str(caught.value)


def test_a_chat_samples_at_temperature_1_and_gets_as_much_as_fits(model: Model) -> None:
    call = parse(model, CHAT, messages=MESSAGES)
    assert call.requests == (GenerationRequest(messages=MESSAGES, sampling=Sampling(do_sample=True)),)
    assert isinstance(call.encoder, ObjectEncoder) and not call.encoder.stream


def test_a_completion_gets_16_tokens(model: Model) -> None:
    (request,) = parse(model, COMPLETIONS, prompt="The wolf").requests
    assert request == GenerationRequest(prompt="The wolf", sampling=Sampling(do_sample=True), default_new_tokens=16)


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (COMPLETIONS, {"prompt": "x"})])
def test_every_parameter_has_its_place(model: Model, path: str, prompt: dict[str, Any]) -> None:
    logprobs = True if path == CHAT else 1
    (request,) = parse(model, path, **prompt, **SAMPLED, max_tokens=7, stop="###", logprobs=logprobs).requests
    assert request.sampling == Sampling(max_new_tokens=7, do_sample=True, **SAMPLED)
    assert (request.stop, request.logprobs, request.needs_logprobs) == (("###",), True, True)


def test_the_newer_name_of_the_limit_is_the_same_limit(model: Model) -> None:
    assert parse(model, CHAT, messages=MESSAGES, max_completion_tokens=5).requests[0].sampling.max_new_tokens == 5
    assert "mean the same" in refusal(model, CHAT, messages=MESSAGES, max_completion_tokens=5, max_tokens=6)


def test_temperature_0_is_greedy(model: Model) -> None:
    assert not parse(model, CHAT, messages=MESSAGES, temperature=0).requests[0].sampling.do_sample


@pytest.mark.parametrize(
    ("body", "kind", "named"),
    [
        ({"logit_bias": {"50256": -100}}, UnsupportedParameterError, "logit_bias"),
        ({"top_logprobs": 2}, InvalidRequestError, "expected 'logprobs' to be true"),
        ({"top_logprobs": 21, "logprobs": True}, InvalidRequestError, "'top_logprobs' is 21"),
        ({"functions": [{}]}, UnsupportedParameterError, "functions"),
        ({"audio": {}}, UnsupportedParameterError, "audio"),
        ({"modalities": ["audio"]}, InvalidRequestError, "modalities"),
        ({"temperatur": 1}, InvalidRequestError, "did you mean 'temperature'"),
        ({"temperature": 2.1}, InvalidRequestError, "temperature"),
        ({"prompt": "x"}, InvalidRequestError, "belongs to /v1/completions"),
        ({"stream_options": {"include_usage": True}}, InvalidRequestError, "expected 'stream' to be true"),
        ({"stream": True, "stream_options": {"usage": True}}, InvalidRequestError, "'stream_options' \"usage\""),
        ({"stream": True, "stream_options": {"include_usage": 1}}, InvalidRequestError, "include_usage"),
        ({"stream": True, "best_of": 2}, InvalidRequestError, "best_of"),
        ({"n": 17}, InvalidRequestError, "'n' is 17: expected at most 16"),
        ({"messages": []}, InvalidRequestError, "messages"),
    ],
)
def test_what_is_wrong_is_named(
    model: Model, body: dict[str, Any], kind: type[InvalidRequestError], named: str
) -> None:
    with pytest.raises(kind, match=named) as caught:
        parse(model, CHAT, **{"messages": MESSAGES, **body})
    assert type(caught.value) is kind


def test_the_most_likely_tokens_are_asked_for(model: Model) -> None:
    (request,) = parse(model, CHAT, messages=MESSAGES, logprobs=True, top_logprobs=20).requests
    assert (request.logprobs, request.needs_logprobs, request.top_logprobs) == (True, True, 20)


def test_what_changes_nothing_is_accepted(model: Model) -> None:
    neutral: dict[str, Any] = {"logit_bias": {}, "top_logprobs": 0, "modalities": ["text"], "stop": None}
    assert parse(model, CHAT, messages=MESSAGES, **neutral).requests == parse(model, CHAT, messages=MESSAGES).requests


def test_a_response_format_is_a_guide(model: Model) -> None:
    schema = {"type": "object"}
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
    guides = [
        parse(model, CHAT, messages=MESSAGES, response_format=given).requests[0].guide
        for given in ({"type": "text"}, {"type": "json_object"}, format_)
    ]
    assert guides == [None, Guide(GuideKind.JSON_OBJECT), Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')]


def test_the_template_gets_its_keywords(model: Model) -> None:
    given = {
        "chat_template_kwargs": {"enable_thinking": False, "chat_template": "mine"},
        "add_generation_prompt": False,
    }
    (request,) = parse(model, CHAT, messages=MESSAGES, **given).requests
    assert request.template == {"enable_thinking": False, "add_generation_prompt": False}


def test_a_completion_has_one_generation_for_each_prompt(model: Model) -> None:
    call = parse(model, COMPLETIONS, prompt=["a wolf", "a fox"], n=2, stream=True)
    assert ([request.prompt for request in call.requests], call.sequences) == (["a wolf", "a fox"], 4)
    assert isinstance(call.encoder, EventEncoder) and call.encoder.stream
    assert [request.prompt_ids for request in parse(model, COMPLETIONS, prompt=[3, 4]).requests] == [[3, 4]]
    assert [request.prompt_ids for request in parse(model, COMPLETIONS, prompt=[[3], [4, 5]]).requests] == [[3], [4, 5]]


@pytest.mark.parametrize("prompt", [None, "", [], [[]], ["a", ""], [1.5], [True], ["a"] * 65, {"a": 1}, [["a"]]])
def test_a_prompt_that_is_none_is_refused(model: Model, prompt: Any) -> None:
    assert "expected a text, a list of token ids" in refusal(model, COMPLETIONS, prompt=prompt)


def test_a_token_id_is_one_of_the_vocabulary(model: Model) -> None:
    size = model.tokenizer.vocab_size
    assert parse(model, COMPLETIONS, prompt=[size - 1, 0]).requests[0].prompt_ids == [size - 1, 0]
    for id_ in (size, -1):
        assert f"expected 0 to {size - 1}" in refusal(model, COMPLETIONS, prompt=[3, id_])


def test_a_request_has_at_most_128_sequences(model: Model) -> None:
    assert parse(model, COMPLETIONS, prompt=["a"] * 64, n=2).sequences == 128
    assert "43 prompts with 3 sequences each" in refusal(model, COMPLETIONS, prompt=["a"] * 43, n=3)


def test_more_than_the_chosen_tokens_logprob_is_refused(model: Model) -> None:
    assert parse(model, COMPLETIONS, prompt="a", logprobs=0).requests[0].logprobs
    assert [parse(model, COMPLETIONS, prompt="a", logprobs=n).requests[0].top_logprobs for n in range(4)] == [
        0,
        0,
        2,
        3,
    ]
    assert "'logprobs' is 6" in refusal(model, COMPLETIONS, prompt="a", logprobs=6)
    message = "'echo' with 'logprobs': the prompt's log-probabilities are not available"
    assert refusal(model, COMPLETIONS, prompt="a", logprobs=1, echo=True) == message


@pytest.mark.parametrize(("body", "message"), [(b"{", "not valid JSON"), (b"[]", "expected a JSON object")])
def test_a_body_is_a_json_object_whatever_its_type(model: Model, body: bytes, message: str) -> None:
    for path in (CHAT, COMPLETIONS):
        with pytest.raises(InvalidRequestError, match=message):
            OPENAI.parse(RawRequest(body, {"content-type": "text/plain"}, path), model)


def test_a_response_has_the_models_name(model: Model) -> None:
    body = orjson.dumps({"messages": MESSAGES, "model": ""})
    encoder = OPENAI.parse(RawRequest(body, {}, CHAT), replace(model, name="a story")).encoder
    assert isinstance(encoder, ObjectEncoder)
    assert encoder.response.model == "a story"


@pytest.mark.parametrize(
    ("body", "name"), [({}, None), ({"model": None}, None), ({"model": ""}, None), ({"model": "a"}, "a")]
)
def test_the_body_may_name_the_model(body: dict[str, Any], name: str | None) -> None:
    assert read_model_name(RawRequest(orjson.dumps(body), {})) == name
    with pytest.raises(InvalidRequestError, match="'model' is 0: expected a string"):
        read_model_name(RawRequest(b'{"model": 0}', {}))
