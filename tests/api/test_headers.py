from __future__ import annotations

import uuid

import pytest

from djl_trtllm.api import headers


def test_custom_attributes_become_properties() -> None:
    found = headers.properties(
        [
            ("Content-Type", "application/json"),
            ("X-Amzn-SageMaker-Custom-Attributes", "Trace=abc; k2 = v=2 ;flag;=x;content-type=text/plain"),
        ]
    )
    assert found["trace"] == "abc"
    assert found["k2"] == "v=2"
    assert "flag" not in found
    assert "" not in found
    assert found["content-type"] == "application/json"


def test_the_first_of_equal_headers_counts() -> None:
    assert headers.properties([("A", "1"), ("a", "2")]) == {"a": "1"}


def test_request_id_is_the_clients() -> None:
    assert headers.request_id({"x-request-id": "r-1", headers.INFERENCE_ID: "s-1"}) == "r-1"


def test_request_id_header_is_configurable() -> None:
    assert headers.request_id({"x-trace": "t-1", "x-request-id": "r-1"}, "X-Trace") == "t-1"


def test_request_id_is_sagemakers_inference_id_otherwise() -> None:
    assert headers.request_id({headers.INFERENCE_ID: "s-1"}) == "s-1"


def test_the_names_of_the_headers_are_amazons() -> None:
    assert headers.CUSTOM_ATTRIBUTES == "x-amzn-sagemaker-custom-attributes"
    assert headers.INFERENCE_ID == "x-amzn-sagemaker-inference-id"
    assert headers.REQUEST_ID == "x-request-id"


def test_an_id_of_256_characters_is_the_longest() -> None:
    assert headers.request_id({"x-request-id": "x" * 256}) == "x" * 256
    assert headers.request_id({"x-request-id": " a b "}) != "a b"
    assert headers.request_id({"x-request-id": "x" * 257, headers.INFERENCE_ID: "s-1"}) == "s-1"
    assert headers.request_id({"x-request-id": " !~ "}) == "!~"


def test_request_id_is_generated_where_none_is_usable() -> None:
    for given in ({}, {"x-request-id": ""}, {"x-request-id": "a\r\nb"}, {"x-request-id": "x" * 300}):
        assert uuid.UUID(headers.request_id(given))


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("text/event-stream", True),
        ("Application/JSON, Text/Event-Stream;q=0.5", True),
        ("application/jsonlines", False),
        ("application/x-ndjson", False),
        ("application/jsonlines, text/event-stream", False),
        ("application/jsonlines;q=0.5, text/event-stream", True),
        ("text/event-stream; charset=utf-8; q=0.4, application/json-lines; q=0.6", False),
        ("text/event-stream;q=0", None),
        ("text/event-stream;q=x", True),
        ("application/json", None),
        ("*/*", None),
        ("", None),
    ],
)
def test_accept_says_whether_a_stream_is_events(accept: str, wanted: bool | None) -> None:
    assert headers.prefers_events({"accept": accept}) is wanted


@pytest.mark.parametrize("agent", ["unknown/None; hf_hub/1.21.0; python/3", "OpenAI/Python 3.54.0", "AsyncOpenAI/JS"])
def test_clients_that_read_only_events_get_events(agent: str) -> None:
    assert headers.prefers_events({"accept": "application/json", "user-agent": agent}) is True
    assert headers.prefers_events({"accept": "application/jsonlines", "user-agent": agent}) is False
    assert headers.from_hugging_face({"user-agent": agent}) is ("hf_hub" in agent)


def test_other_clients_do_not_say() -> None:
    assert headers.prefers_events({"user-agent": "curl/8.5"}) is None
    assert headers.prefers_events({}) is None
    assert not headers.from_hugging_face({})


@pytest.mark.parametrize("value", ["a=b", "x" * 1024, "~ !"])
def test_custom_attributes_are_returned(value: str) -> None:
    found = headers.returned_attributes({headers.CUSTOM_ATTRIBUTES: f" {value} "})
    assert found == ((headers.CUSTOM_ATTRIBUTES, value),)


@pytest.mark.parametrize("value", ["", "x" * 1025, "\u00e9", "a\tb"])
def test_custom_attributes_that_sagemaker_does_not_take_are_not_returned(value: str) -> None:
    assert headers.returned_attributes({headers.CUSTOM_ATTRIBUTES: value}) == ()
    assert headers.returned_attributes({}) == ()
