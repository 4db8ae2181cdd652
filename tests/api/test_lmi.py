from __future__ import annotations

import contextlib
import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api import Call, Defaults, lmi
from djl_trtllm.api.formatters import JsonFramer, LinesFramer
from djl_trtllm.api.lmi import FORMATTERS
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError

from .scripts import EOS, answer, several


def parse(payload: Any, defaults: Defaults = Defaults(), **properties: str) -> Call:  # noqa: B008
    return lmi.parse(json.dumps(payload).encode(), "application/json", defaults, properties)


def inputs(stream: bool = False, defaults: Defaults = Defaults(), **parameters: Any) -> Call:  # noqa: B008
    return parse({"inputs": "The wolf", "parameters": parameters, "stream": stream}, defaults)


def chat(defaults: Defaults = Defaults(), **fields: Any) -> Call:  # noqa: B008
    return parse({"messages": [{"role": "user", "content": "Hello"}], **fields}, defaults)


def refusal(payload: Any, defaults: Defaults = Defaults()) -> str:  # noqa: B008
    with pytest.raises(InvalidRequestError) as caught:
        parse(payload, defaults)
    assert str(caught.value).startswith("Input Parsing failed. Ensure that the request payload is valid. ")
    return str(caught.value)


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_the_documents_request() -> None:
    call = parse(
        {"inputs": "tell me a story of the little red riding hood", "parameters": {"do_sample": True}, "stream": True}
    )
    assert call.request.prompt == "tell me a story of the little red riding hood"
    assert call.request.sampling.do_sample
    assert call.request.sampling.max_new_tokens == 30
    assert call.framer.content_type == "application/jsonlines"


@pytest.mark.parametrize(
    "content_type",
    [None, "", "application/json", "Application/JSON; charset=utf-8", "application/octet-stream", "application/x+json"],
)
def test_json_comes_under_these_types(content_type: str | None) -> None:
    assert lmi.parse(b'{"inputs": "a"}', content_type).request.prompt == "a"


def test_plain_text_is_the_prompt() -> None:
    assert lmi.parse("Grüße\n".encode(), "text/plain; charset=UTF-8").request.prompt == "Grüße\n"


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (b"{", "application/json", "not valid JSON"),
        (b'{"inputs": "\\ud800"}', "application/json", "not valid JSON"),
        (b"", None, "does not contain any content"),
        (b"\xff", "text/plain", "not UTF-8"),
        (b"a", "text/plain; charset=latin-1", "utf-8"),
        (b"inputs\na", "text/csv", "expected application/json or text/plain"),
        (b"a=b", "application/x-www-form-urlencoded", "-H 'Content-Type: application/json'"),
        (b"", "tensor/npz", "expected application/json or text/plain"),
        (b"", "image/png", "expected application/json or text/plain"),
    ],
)
def test_other_bodies_are_refused(body: bytes, content_type: str | None, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        lmi.parse(body, content_type)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        ([1], "Invalid request payload. Request payload should be a json object specifying the 'inputs' field."),
        ({}, "Invalid request payload. Request payload should be a json object specifying the 'inputs' field."),
        ({"inputs": None}, "specifying the 'inputs' field"),
        ({"inputs": ["a"]}, "Invalid request payload. The 'inputs' field must be a string"),
        ({"inputs": ""}, "Invalid request payload. The 'inputs' field does not contain any content."),
        ({"inputs": "a", "parameters": [1]}, "'parameters' must be provided as an object of key-value pairs."),
    ],
)
def test_djls_wording_is_kept(payload: Any, says: str) -> None:
    assert says in refusal(payload)


def test_all_problems_are_told_at_once() -> None:
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
    for defaults in (Defaults(), Defaults(bedrock_compat=True, tgi_compat=True)):
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
    sampling = inputs(**parameters).request.sampling
    assert sampling.do_sample is samples
    assert sampling.temperature > 0


def test_chat_samples_unless_told_otherwise() -> None:
    assert chat().request.sampling.do_sample
    assert not chat(temperature=0).request.sampling.do_sample
    assert not chat(do_sample=False).request.sampling.do_sample


def test_chat_without_max_tokens_takes_what_fits() -> None:
    assert chat().request.sampling.max_new_tokens == lmi.AS_MUCH_AS_FITS
    assert chat(max_tokens=5).request.sampling.max_new_tokens == 5
    assert "'max_tokens' is 0" in refusal({"messages": [{"role": "user", "content": "a"}], "max_tokens": 0})


def test_best_of_and_n() -> None:
    def counts(**parameters: Any) -> tuple[int, int | None]:
        sampling = inputs(**parameters).request.sampling
        return sampling.n, sampling.best_of

    assert counts() == (1, None)
    assert counts(n=1, best_of=1) == (1, None)
    assert counts(n=3) == (3, 3)
    assert counts(best_of=3) == (1, 3)
    assert counts(n=2, best_of=3) == (2, 3)
    assert counts(best_of=3, defaults=Defaults(tgi_compat=True)) == (3, 3)
    for parameters, says in (
        ({"n": 3, "best_of": 2}, "'best_of' is 2: expected at least 'n', which is 3"),
        ({"n": 17}, "'n' is 17: expected at most 16"),
        ({"n": 2**40}, "expected at most 16"),
        ({"n": 2**40, "best_of": 1}, "expected at most 16"),
        ({"best_of": 17}, "'best_of' is 17: expected at most 16"),
    ):
        assert says in refusal({"inputs": "a", "parameters": parameters})


def test_several_sequences_are_answered_whole() -> None:
    several_sequences: tuple[dict[str, Any], ...] = ({"n": 2}, {"best_of": 2})
    for name in ("jsonlines", "sse", "3p", "3p_stream"):
        for parameters in several_sequences:
            call = inputs(defaults=Defaults(output_formatter=name), **parameters)
            assert isinstance(call.framer, JsonFramer)
            assert call.request.logprobs
    details = orjson.loads(answer(inputs(n=3).framer, several(3)))["details"]
    assert [other["generated_text"] for other in details["best_of_sequences"]] == ["10 11", "20 21"]
    for name in FORMATTERS:
        for stream in (False, True):
            assert answer(chat(n=3, stream=stream, output_formatter=name).framer, several(3))
    assert "'stream' is true" in refusal({"inputs": "a", "stream": True, "parameters": {"n": 2}})


def test_chat_choices_can_be_streamed_but_not_ranked() -> None:
    sampling = chat(n=2, stream=True).request.sampling
    assert (sampling.n, sampling.best_of) == (2, None)
    chat(n=2, best_of=3)
    message = {"messages": [{"role": "user", "content": "a"}], "n": 2, "best_of": 3, "stream": True}
    assert "'best_of' or 'num_beams' is 3" in refusal(message)


def test_more_least_than_most_tokens_are_refused() -> None:
    message = refusal({"inputs": "a", "parameters": {"min_length": 31}})
    assert "the least number of new tokens is 31" in message
    assert chat(min_tokens=100).request.sampling.min_new_tokens == 100


def test_log_probabilities_are_asked_for_where_they_are_shown() -> None:
    assert not inputs().request.logprobs
    assert inputs(details=True).request.logprobs
    assert inputs(stream=True).request.logprobs
    assert not chat(stream=True).request.logprobs
    assert chat(logprobs=True, top_logprobs=1).request.logprobs


# -- formatters --------------------------------------------------------------------------------------------------------

JSON, JSONLINES, SSE = "application/json", "application/jsonlines", "text/event-stream"


@pytest.mark.parametrize(
    ("stream", "defaults", "asked", "content_type"),
    [
        (False, Defaults(), None, JSON),
        (True, Defaults(), None, JSONLINES),
        (True, Defaults(tgi_compat=True), None, SSE),
        (False, Defaults(tgi_compat=True), None, JSON),
        (True, Defaults(output_formatter="sse"), None, SSE),
        (False, Defaults(output_formatter="jsonlines"), None, JSONLINES),
        (True, Defaults(output_formatter="json"), None, JSON),
        (True, Defaults(output_formatter="json"), "sse", SSE),
        (True, Defaults(output_formatter="unheard"), None, JSONLINES),
        (True, Defaults(), "unheard", JSONLINES),
        (True, Defaults(), "none", "text/plain"),
    ],
)
def test_choice_of_formatter(stream: bool, defaults: Defaults, asked: str | None, content_type: str) -> None:
    call = inputs(stream, defaults, output_formatter=asked)
    assert call.framer.content_type == content_type


@pytest.mark.parametrize(
    ("option", "asked", "stream", "content_type"),
    [
        (None, None, False, JSON),
        (None, None, True, JSONLINES),
        ("sse", None, True, JSONLINES),
        ("sse_chat", None, True, SSE),
        (None, "sse_chat", True, SSE),
        ("unheard", None, True, JSONLINES),
    ],
)
def test_choice_of_chat_formatter(option: str | None, asked: str | None, stream: bool, content_type: str) -> None:
    framer = chat(Defaults(output_formatter=option), output_formatter=asked, stream=stream).framer
    assert framer.content_type == content_type
    assert b"chatcmpl-" in answer(framer, EOS)


def test_an_unknown_formatter_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    inputs(output_formatter="unheard")
    assert "unheard" in caplog.text


def test_tgi_compat_turns_details_on() -> None:
    assert "details" in orjson.loads(answer(inputs(defaults=Defaults(tgi_compat=True)).framer, EOS))[0]
    refused = inputs(defaults=Defaults(tgi_compat=True), details=False)
    assert "details" not in orjson.loads(answer(refused.framer, EOS))[0]


# -- chat and Bedrock --------------------------------------------------------------------------------------------------


def test_text_parts_are_joined_and_other_fields_kept() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse({"messages": [{"role": "user", "content": parts, "name": "Anna"}]})
    assert call.request.messages == [{"role": "user", "content": "a\nb", "name": "Anna"}]


@pytest.mark.parametrize("messages", [[], "Hello", {}, ["Hello"], [{"role": "user"}], [{"content": "a"}]])
def test_messages_of_another_form_are_refused(messages: Any) -> None:
    assert "messages" in refusal({"messages": messages})


def test_images_are_refused_by_name() -> None:
    content = [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]
    with pytest.raises(UnsupportedParameterError, match="image_url"):
        parse({"messages": [{"role": "user", "content": content}]})


def test_a_bedrock_request() -> None:
    defaults = Defaults(bedrock_compat=True)
    call = parse({"prompt": "a", "max_gen_len": 9}, defaults)
    sampling = call.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens, sampling.do_sample) == (0.5, 0.9, 9, True)
    assert not parse({"prompt": "a", "temperature": 0}, defaults).request.sampling.do_sample
    assert parse({"prompt": "a"}, defaults).request.sampling.max_new_tokens == 512
    assert call.framer.content_type == JSON
    assert "'prompt' field" in refusal({"inputs": "a"}, defaults)


def test_a_bedrock_stream_is_asked_for_by_the_invocation() -> None:
    body = b'{"prompt": "a"}'
    properties = {"x-amzn-sagemaker-forwarded-api": "InvokeEndpointWithResponseStream"}
    call = lmi.parse(body, None, Defaults(bedrock_compat=True), properties)
    assert call.framer.content_type == JSONLINES


def test_the_adapter_header_names_the_adapter_unless_the_body_does() -> None:
    header = {"x-amzn-sagemaker-adapter-identifier": "french"}
    assert lmi.parse(b'{"inputs": "a"}', None, Defaults(), header).request.adapter == "french"
    assert lmi.parse(b'{"inputs": "a", "adapters": "dutch"}', None, Defaults(), header).request.adapter == "dutch"


def test_streams_are_lines() -> None:
    assert isinstance(inputs(stream=True).framer, LinesFramer)
