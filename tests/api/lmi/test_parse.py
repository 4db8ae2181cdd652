from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api import Call
from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.api.lmi.encoders import JsonEncoder, JsonLinesEncoder
from djl_trtllm.api.lmi.parse import FORMATTERS
from djl_trtllm.api.lmi.presentation import Presentation
from djl_trtllm.config import Options
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from tests.api.scripts import EOS, answer, several


def parse(payload: Any, defaults: Options = Options(), **properties: str) -> Call:  # noqa: B008
    return lmi.parse(json.dumps(payload).encode(), "application/json", defaults, properties)


def inputs(stream: bool = False, defaults: Options = Options(), **parameters: Any) -> Call:  # noqa: B008
    return parse({"inputs": "The wolf", "parameters": parameters, "stream": stream}, defaults)


def chat(defaults: Options = Options(), **fields: Any) -> Call:  # noqa: B008
    return parse({"messages": [{"role": "user", "content": "Hello"}], **fields}, defaults)


def refusal(payload: Any, defaults: Options = Options()) -> str:  # noqa: B008
    with pytest.raises(InvalidRequestError) as caught:
        parse(payload, defaults)
    assert str(caught.value).startswith("Input Parsing failed. Ensure that the request payload is valid. ")
    return str(caught.value)


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_the_documents_request() -> None:
    call = parse(
        {"inputs": "tell me a story of the little red riding hood", "parameters": {"do_sample": True}, "stream": True}
    )
    assert call.requests[0].prompt == "tell me a story of the little red riding hood"
    assert call.requests[0].sampling.do_sample
    assert (call.requests[0].sampling.max_new_tokens, call.requests[0].default_new_tokens) == (0, 30)
    assert call.encoder.content_type == "application/jsonlines"


@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/octet-stream",
        "binary/octet-stream",
        "application/x+json",
        "application/jsonlines",
        " text/json ",
    ],
)
def test_json_comes_under_these_types(content_type: str | None) -> None:
    assert lmi.parse(b'{"inputs": "a"}', content_type).requests[0].prompt == "a"


@pytest.mark.parametrize(
    "content_type",
    [
        "text/plain",
        "Text/Plain; charset=UTF-8",
        "text/plain;charset=utf8",
        'text/plain; charset="us-ascii"',
        "text/plain; charset='ascii'",
        "text/plain; format=flowed",
    ],
)
def test_plain_text_is_the_prompt(content_type: str) -> None:
    assert lmi.parse("Grüße\n".encode(), content_type).requests[0].prompt == "Grüße\n"


NOT_ACCEPTED = "is not accepted: expected application/json or text/plain"


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (
            b"{",
            "application/json",
            'The body is not valid JSON: unexpected end of data: line 1 column 2 (char 1). Received "{"',
        ),
        (b" \n", None, "The 'inputs' field does not contain any content: the body is empty"),
        (b"a", "text/plain; charset=latin-1", 'Charset "latin-1" is not utf-8'),
        (b"a", "text/plain; charset=X", 'Charset "x" is not utf-8'),
        (b"inputs\na", "text/csv", f'Content type "text/csv" {NOT_ACCEPTED}'),
        (b"", "tensor/npz", f'Content type "tensor/npz" {NOT_ACCEPTED}'),
        (
            b"a=b",
            "application/x-www-form-urlencoded",
            'Content type "application/x-www-form-urlencoded" is not accepted (curl -d sends this type by itself: '
            "add -H 'Content-Type: application/json'): expected application/json or text/plain",
        ),
    ],
)
def test_other_bodies_are_refused_with_what_to_send(body: bytes, content_type: str | None, says: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        lmi.parse(body, content_type)
    begin = "Input Parsing failed. Ensure that the request payload is valid. Invalid request payload. "
    assert str(caught.value) == begin + says


def test_a_body_that_is_no_json_is_shown_as_far_as_it_helps() -> None:
    with pytest.raises(InvalidRequestError, match=r"not valid JSON: .* Received \"aaaa"):
        lmi.parse(b"a" * 10_000, "application/json")
    with pytest.raises(InvalidRequestError, match='Received "\ufffd'):
        lmi.parse(b"\xff" * 300, "application/json")
    with pytest.raises(InvalidRequestError, match=r"The text is not UTF-8: .*0xff"):
        lmi.parse(b"\xff", "text/plain")
    with pytest.raises(InvalidRequestError, match="not valid JSON"):
        lmi.parse(b'{"inputs": "\\ud800"}', "application/json")


NO_INPUTS = "Invalid request payload. Request payload should be a json object specifying the 'inputs' field. "


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ([1], f"{NO_INPUTS}Received payload [1]"),
        (None, f"{NO_INPUTS}Received payload null"),
        ({}, f"{NO_INPUTS}Received payload {{}}"),
        ({"inputs": None}, f'{NO_INPUTS}Received payload {{"inputs":null}}'),
        ({"inputs": 3}, "Invalid request payload. The 'inputs' field must be a string. Received 3"),
        (
            {"inputs": ["a"]},
            "Invalid request payload. The 'inputs' field must be a string. Received [\"a\"]: send one request per "
            "prompt, they are batched here",
        ),
        (
            {"inputs": ""},
            "Invalid request payload. The 'inputs' field does not contain any content. Received payload "
            '{"inputs":""}',
        ),
        (
            {"inputs": "a", "parameters": [1]},
            "Invalid request payload. 'parameters' must be provided as an object of key-value pairs. Received [1]",
        ),
    ],
)
def test_djls_wording_is_kept(payload: Any, says: str) -> None:
    assert refusal(payload) == "Input Parsing failed. Ensure that the request payload is valid. " + says


def test_no_parameters_are_none() -> None:
    plain = parse({"inputs": "a"}).requests
    nothing: tuple[Any, ...] = (None, {})
    for parameters in nothing:
        assert parse({"inputs": "a", "parameters": parameters}).requests == plain


def test_an_unknown_name_is_reported_with_the_kind_of_place_it_stands_in() -> None:
    assert 'unknown field "qqqq"' in refusal({"inputs": "a", "qqqq": 1})
    assert 'unknown parameter "qqqq"' in refusal({"inputs": "a", "parameters": {"qqqq": 1}})
    assert 'unknown field "qqqq"' in refusal({"messages": [{"role": "user", "content": "a"}], "qqqq": 1})
    assert 'unknown field "qqqq"' in refusal({"prompt": "a", "qqqq": 1}, Options(bedrock_compat=True))


def test_all_problems_are_reported_at_once() -> None:
    message = refusal({"inputs": 3, "steam": True, "parameters": {"top_p": 2, "max_token": 3, "top_n_tokens": 4}})
    for part in ("'inputs' field", "did you mean 'stream'", "'top_p' is 2", "max_new_tokens", "'top_n_tokens' is 4"):
        assert part in message


def test_messages_are_bounded() -> None:
    assert len(refusal({"inputs": ["a" * 100_000], "b" * 100_000: 1})) < 1000
    assert "and 190 more" in refusal({"inputs": "a", "parameters": {f"x{i}x": 1 for i in range(200)}})


def test_misplaced_fields_are_sent_where_they_belong() -> None:
    assert "'max_new_tokens' belongs in 'parameters'" in refusal({"inputs": "a", "max_new_tokens": 3})
    message = [{"role": "user", "content": "a"}]
    assert "'inputs' belongs to requests without 'messages'" in refusal({"inputs": "a", "messages": message})
    assert "'prompt' belongs to requests under option.bedrock_compat" in refusal({"prompt": "a"})
    assert "'stream' belongs beside 'parameters'" in refusal({"inputs": "a", "parameters": {"stream": True}})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["inputs", "parameters", "messages", "stream", "role", "content", "temperature", "stop"]
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_payload_is_parsed_or_refused(payload: Any) -> None:
    for defaults in (Options(), Options(bedrock_compat=True, tgi_compat=True)):
        try:
            lmi.parse_payload(payload, defaults)
        except InvalidRequestError as error:
            assert len(str(error)) < 4000


@given(st.binary(max_size=40))
def test_any_body_is_parsed_or_refused(body: bytes) -> None:
    for content_type in (None, "text/plain"):
        with contextlib.suppress(InvalidRequestError):
            lmi.parse(body, content_type)


# -- sampling ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "samples"),
    [
        ({}, False),
        ({"seed": 1}, False),
        ({"temperature": 1.0}, False),
        ({"temperature": 0}, False),
        ({"temperature": 0.7}, True),
        ({"top_k": 0}, False),
        ({"top_k": 1}, False),
        ({"top_k": 50}, True),
        ({"top_p": 1}, False),
        ({"top_p": 0.9}, True),
        ({"top_p": 0.9, "do_sample": False}, False),
        ({"do_sample": True}, True),
        ({"do_sample": True, "temperature": 0}, False),
        ({"temperature": 0, "top_p": 0.9}, False),
    ],
)
def test_when_a_request_samples(parameters: dict[str, Any], samples: bool) -> None:
    sampling = inputs(**parameters).requests[0].sampling
    assert sampling.do_sample is samples
    assert sampling.temperature > 0


def test_chat_samples_unless_reported_otherwise() -> None:
    assert chat().requests[0].sampling.do_sample
    assert not chat(temperature=0).requests[0].sampling.do_sample
    assert not chat(do_sample=False).requests[0].sampling.do_sample


def test_several_sequences_are_answered_whole() -> None:
    several_sequences: tuple[dict[str, Any], ...] = ({"n": 2}, {"best_of": 2})
    for name in ("jsonlines", "sse", "3p", "3p_stream"):
        for parameters in several_sequences:
            call = inputs(defaults=Options(output_formatter=name), **parameters)
            assert isinstance(call.encoder, JsonEncoder)
            assert call.requests[0].logprobs
    details = orjson.loads(answer(inputs(n=3).encoder, several(3)))["details"]
    assert [other["generated_text"] for other in details["best_of_sequences"]] == ["10 11", "20 21"]
    for name in FORMATTERS:
        for stream in (False, True):
            assert answer(chat(n=3, stream=stream, output_formatter=name).encoder, several(3))
    assert "'stream' is true" in refusal({"inputs": "a", "stream": True, "parameters": {"n": 2}})


# -- formatters --------------------------------------------------------------------------------------------------------

JSON, JSONLINES, SSE = "application/json", "application/jsonlines", "text/event-stream"


@pytest.mark.parametrize(
    ("stream", "defaults", "asked", "content_type"),
    [
        (False, Options(), None, JSON),
        (True, Options(), None, JSONLINES),
        (True, Options(tgi_compat=True), None, SSE),
        (False, Options(tgi_compat=True), None, JSON),
        (True, Options(output_formatter="sse"), None, SSE),
        (False, Options(output_formatter="jsonlines"), None, JSONLINES),
        (True, Options(output_formatter="json"), None, JSON),
        (True, Options(output_formatter="json"), "sse", SSE),
        (True, Options(output_formatter="unheard"), None, JSONLINES),
        (True, Options(), "unheard", JSONLINES),
        (True, Options(), "none", "text/plain"),
    ],
)
def test_choice_of_formatter(stream: bool, defaults: Options, asked: str | None, content_type: str) -> None:
    call = inputs(stream, defaults, output_formatter=asked)
    assert call.encoder.content_type == content_type


@pytest.mark.parametrize(
    ("option", "asked", "stream", "content_type"),
    [
        (None, None, False, JSON),
        (None, None, True, JSONLINES),
        ("sse", None, True, JSONLINES),
        ("sse_chat", None, True, SSE),
        ("json_chat", None, True, JSON),
        ("jsonlines_chat", None, False, JSONLINES),
        (None, "sse_chat", True, SSE),
        ("unheard", None, True, JSONLINES),
    ],
)
def test_choice_of_chat_formatter(option: str | None, asked: str | None, stream: bool, content_type: str) -> None:
    encoder = chat(Options(output_formatter=option), output_formatter=asked, stream=stream).encoder
    assert encoder.content_type == content_type
    assert b"chatcmpl-" in answer(encoder, EOS)


def test_an_unknown_formatter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    message = 'Unsupported output formatter: "unheard"; using the default'
    inputs(output_formatter="unheard")
    assert caplog.messages == [message]
    chat(output_formatter="unheard")
    assert caplog.messages == [message] * 2
    inputs()
    chat()
    chat(Options(output_formatter="unheard"))
    assert caplog.messages == [message] * 2


def test_every_formatter_has_its_name() -> None:
    types = {name: FORMATTERS[name](Presentation()).content_type for name in FORMATTERS}
    assert types == {
        "json": JSON,
        "jsonlines": JSONLINES,
        "sse": SSE,
        "json_chat": JSON,
        "jsonlines_chat": JSONLINES,
        "sse_chat": SSE,
        "3p": JSON,
        "3p_stream": JSONLINES,
        "none": "text/plain",
    }


def test_tgi_compat_turns_details_on() -> None:
    assert "details" in orjson.loads(answer(inputs(defaults=Options(tgi_compat=True)).encoder, EOS))[0]
    refused = inputs(defaults=Options(tgi_compat=True), details=False)
    assert "details" not in orjson.loads(answer(refused.encoder, EOS))[0]


# -- chat and Bedrock --------------------------------------------------------------------------------------------------


def test_text_parts_are_joined_and_other_fields_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse({"messages": [{"role": "user", "content": parts, "name": "Anna"}]})
    assert call.requests[0].messages == [{"role": "user", "content": "a\nb", "name": "Anna"}]


@pytest.mark.parametrize("messages", [[], "Hello", {}, ["Hello"], [{"role": "user"}], [{"content": "a"}]])
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    assert "messages" in refusal({"messages": messages})


def test_images_are_refused_by_name() -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    with pytest.raises(UnsupportedParameterError, match="image_url"):
        parse({"messages": [{"role": "user", "content": content}]})


def test_streams_are_lines() -> None:
    assert isinstance(inputs(stream=True).encoder, JsonLinesEncoder)
