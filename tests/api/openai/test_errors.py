from __future__ import annotations

import json

import pytest

from djl_trtllm.api.openai.errors import encode_error, error_object
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestError,
)
from tests.api.error_rows import headers_of, rows

ROWS = rows(
    InvalidRequestError=(400, "invalid_request_error", None),
    PromptTooLongError=(400, "invalid_request_error", "context_length_exceeded"),
    UnsupportedParameterError=(400, "invalid_request_error", "unsupported_parameter"),
    UnknownAdapterError=(404, "invalid_request_error", "model_not_found"),
    UnknownModelError=(404, "invalid_request_error", "model_not_found"),
    MethodNotAllowedError=(405, "invalid_request_error", "method_not_allowed"),
    RequestTooLargeError=(413, "invalid_request_error", "request_too_large"),
    OverloadedError=(503, "overloaded_error", "overloaded"),
    TooManyRequestsError=(429, "requests", "rate_limit_exceeded"),
    NotReadyError=(503, "server_error", "not_ready"),
    RequestTimeoutError=(504, "server_error", "timeout"),
    GenerationError=(500, "server_error", None),
)


@pytest.mark.parametrize(("error", "status", "kind", "code"), ROWS)
def test_every_error_has_its_status_type_and_code(error: RequestError, status: int, kind: str, code: str) -> None:
    reply = encode_error(error, Options())
    assert (reply.status, reply.content_type) == (status, "application/json")
    assert json.loads(reply.body) == {"error": {"message": "no", "type": kind, "param": None, "code": code}}
    assert dict(reply.headers) == headers_of(error)


def test_the_servers_options_change_the_statuses_of_its_state() -> None:
    options = Options(throttle_error_http_code=429, wlm_error_http_code=502)
    overloaded = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)
    assert (encode_error(overloaded, options).status, encode_error(NotReadyError(""), options).status) == (429, 502)


def test_a_model_that_will_not_be_ready_has_no_time_to_return() -> None:
    assert encode_error(NotReadyError(""), Options()).headers == ()


@pytest.mark.parametrize(
    ("message", "parameter"),
    [
        ("'temperature' is 3: expected a number from 0 to 2", "temperature"),
        ("'messages[0].role' is 1: expected a string", "messages[0].role"),
        ("'n' is 0: no; 'seed' is -1: no", None),
        ("the prompt has 9 tokens", None),
    ],
)
def test_the_parameter_is_named_if_there_is_one(message: str, parameter: str | None) -> None:
    assert error_object(InvalidRequestError(message))["param"] == parameter
    assert error_object(GenerationError(message))["param"] is None


def test_a_defect_keeps_its_secret() -> None:
    reply = encode_error(KeyError("secret"), Options(server_error_http_code=555))
    message = "Internal server error, see the server's log."
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    assert (reply.status, json.loads(reply.body)) == (555, body)
