from __future__ import annotations

from typing import Any

import orjson
import pytest

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.truss.parse import FIELDS, parse
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest, Sampling
from tests.api.tables import check_tables


def read(**body: Any) -> Call:
    return parse(RawRequest(orjson.dumps(body), {}), Options())


def test_a_prompt_alone_is_50_greedy_tokens_streamed() -> None:
    call = read(prompt="What is machine learning?")
    assert call.requests == (GenerationRequest(prompt="What is machine learning?", default_new_tokens=50),)
    assert call.encoder.stream


def test_every_field_of_the_readme_has_its_place() -> None:
    call = read(
        prompt="a wolf",
        max_tokens=7,
        beam_width=2,
        bad_words_list=["bad"],
        stop_words_list=["stop"],
        repetition_penalty=1.2,
        ignore_eos=True,
        stream=False,
    )
    (request,) = call.requests
    assert request.sampling == Sampling(
        max_new_tokens=7, beam_width=2, best_of=None, repetition_penalty=1.2, ignore_eos=True
    )
    assert (request.bad, request.stop, call.encoder.stream) == (("bad",), ("stop",), False)


def test_what_the_templates_code_sends_for_no_words_is_no_words() -> None:
    for none in ([""], [], "", None):
        (request,) = read(prompt="a", bad_words_list=none, stop_words_list=none).requests
        assert (request.bad, request.stop) == ((), ())


def test_sampling_takes_the_fields_of_trusss_library() -> None:
    sampling = read(prompt="a", temperature=0.5, top_p=0.9, top_k=50, max_new_tokens=3).requests[0].sampling
    assert sampling == Sampling(max_new_tokens=3, do_sample=True, temperature=0.5, top_p=0.9, top_k=50)


def test_messages_are_a_chat() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert read(messages=messages).requests[0].messages == messages


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'prompt' is null"),
        ({"prompt": ""}, "expected a text that is not empty"),
        ({"prompt": 3}, "'prompt' is 3: expected a string"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "Hi"}]}, "expected one of them"),
        ({"prompt": "a", "beam_width": 2}, "'beam_width' is 2 and 'stream' not false"),
        ({"prompt": "a", "max_tokens": 0}, "'max_tokens' is 0"),
        ({"prompt": "a", "stop_words_list": [3]}, "stop_words_list"),
        ({"prompt": "a", "max_token": 5}, "did you mean 'max_tokens'"),
        ({"prompt": "a", "inputs": "b"}, "belongs to /invocations"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        read(**body)


def test_a_body_is_an_object() -> None:
    with pytest.raises(InvalidRequestError, match="expected a JSON object with 'prompt'"):
        parse(RawRequest(b"[]", {}), Options())


def test_the_table() -> None:
    check_tables("truss", fields=FIELDS)
