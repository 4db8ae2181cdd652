from __future__ import annotations

import json

import pytest

from djl_trtllm.api.lmi.errors import ERRORS, encode_error, tgi_error_type
from djl_trtllm.api.openapi import request_errors
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    UnknownModelError,
    UnsupportedParameterError,
)

ROWS = {
    "InvalidRequestError": (424, None, "validation"),
    "PromptTooLongError": (424, None, "validation"),
    "UnknownAdapterError": (424, None, "validation"),
    "UnsupportedParameterError": (424, None, "validation"),
    "SessionError": (400, None, "validation"),
    "UnknownModelError": (404, "ResourceNotFoundException", "validation"),
    "MethodNotAllowedError": (405, "MethodNotAllowedException", "validation"),
    "RequestTooLargeError": (413, "RequestEntityTooLargeException", "validation"),
    "OverloadedError": (503, "WlmCapacityException", "overloaded"),
    "TooManyRequestsError": (429, "TooManyRequestsException", "overloaded"),
    "NotReadyError": (503, "WlmException", "unhealthy"),
    "RequestTimeoutError": (400, "TranslateException", "incomplete_generation"),
    "GenerationError": (424, None, "generation"),
    "AuthenticationError": (401, "UnauthorizedException", "validation"),
    "ForbiddenError": (403, "ForbiddenException", "validation"),
}


def test_every_request_error_has_djls_status_and_type_and_tgis_type() -> None:
    found = {}
    for error in request_errors():
        if getattr(error, "name", "") is None:
            continue  # it has a test of its own
        assert any(isinstance(error, kind) for kind in ERRORS)
        answer = encode_error(error, Options())
        assert answer.content_type == "application/json"
        body = json.loads(answer.body)
        assert body["code"] == answer.status
        assert str(error) in (body.get("message"), body.get("error"))
        found[type(error).__name__] = (answer.status, body.get("type"), tgi_error_type(error))
    assert found == ROWS


def test_an_error_that_nobody_mapped_is_one_of_the_engine() -> None:
    assert encode_error(RequestError("odd"), Options()).body == b'{"error":"odd","code":424}'
    assert tgi_error_type(RequestError("odd")) == "generation"


@pytest.mark.parametrize("kind", [InvalidRequestError, PromptTooLongError, UnsupportedParameterError, GenerationError])
def test_a_request_that_fails_by_itself_gets_the_handlers_body(kind: type[RequestError]) -> None:
    answer = encode_error(kind("wrong"), Options())
    assert (answer.status, answer.body) == (424, b'{"error":"wrong","code":424}')


def test_a_request_that_names_no_model_is_a_bad_one() -> None:
    answer = encode_error(UnknownModelError("name one", name=None), Options())
    assert (answer.status, json.loads(answer.body)["type"]) == (400, "BadRequestException")


def test_a_wrong_method_is_answered_with_the_right_ones() -> None:
    assert encode_error(MethodNotAllowedError("no", allow="GET, PUT"), Options()).headers == (("Allow", "GET, PUT"),)


def test_an_overload_tells_the_queue_and_when_to_return() -> None:
    answer = encode_error(OverloadedError("full", queue_depth=100, capacity=128, retry_after=3), Options())
    assert answer.status == 503
    assert json.loads(answer.body) == {
        "code": 503,
        "type": "WlmCapacityException",
        "message": "full",
        "queue_depth": 100,
        "queue_capacity": 128,
    }
    assert answer.headers == (("Retry-After", "3"),)


def test_not_ready_has_retry_after_where_waiting_helps() -> None:
    assert encode_error(NotReadyError("loading", retry_after=5), Options()).headers == (("Retry-After", "5"),)
    assert encode_error(NotReadyError("failed"), Options()).headers == ()


def test_codes_can_be_changed() -> None:
    options = Options(
        throttle_error_http_code=429, wlm_error_http_code=502, timeout_http_code=504, server_error_http_code=599
    )
    errors = [
        InvalidRequestError(""),
        OverloadedError("", queue_depth=0, capacity=0, retry_after=1),
        NotReadyError(""),
        RequestTimeoutError(""),
        ValueError(""),
    ]
    assert [encode_error(error, options).status for error in errors] == [424, 429, 502, 504, 599]


def test_a_defect_tells_no_internals() -> None:
    answer = encode_error(KeyError("secret"), Options())
    assert answer.status == 500
    assert json.loads(answer.body) == {
        "code": 500,
        "type": "InternalServerException",
        "message": "Internal server error, see the server's log.",
    }
