from __future__ import annotations

import uuid

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
