from __future__ import annotations

import json

import pytest

from djl_trtllm.api.openai.errors import encode_error, error_object
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
    RequestTooLargeError,
    UnknownAdapterError,
    UnknownModelError,
    UnsupportedParameterError,
)

ROWS: list[tuple[RequestError, int, str, str | None]] = [
    (InvalidRequestError("no"), 400, "invalid_request_error", None),
    (PromptTooLongError("no"), 400, "invalid_request_error", "context_length_exceeded"),
    (UnsupportedParameterError("no"), 400, "invalid_request_error", "unsupported_parameter"),
    (UnknownAdapterError("no"), 404, "invalid_request_error", "model_not_found"),
    (UnknownModelError("no", name="hen"), 404, "invalid_request_error", "model_not_found"),
    (MethodNotAllowedError("no", allow="POST"), 405, "invalid_request_error", "method_not_allowed"),
    (RequestTooLargeError("no"), 413, "invalid_request_error", "request_too_large"),
    (OverloadedError("no", queue_depth=1, capacity=1, retry_after=1), 503, "overloaded_error", "overloaded"),
    (NotReadyError("no"), 503, "server_error", "not_ready"),
    (RequestTimeoutError("no"), 504, "server_error", "timeout"),
    (GenerationError("no"), 500, "server_error", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), ROWS, ids=lambda value: type(value).__name__)
def test_every_error_has_its_status_type_and_code(error: RequestError, status: int, kind: str, code: str) -> None:
    reply = encode_error(error, Options())
    assert (reply.status, reply.content_type) == (status, "application/json")
    assert json.loads(reply.body) == {"error": {"message": "no", "type": kind, "param": None, "code": code}}


def test_the_servers_options_change_the_statuses_of_its_state() -> None:
    options = Options(throttle_error_http_code=429, wlm_error_http_code=502)
    overloaded = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)
    assert (encode_error(overloaded, options).status, encode_error(NotReadyError(""), options).status) == (429, 502)


def test_headers_say_when_to_return_and_what_to_use() -> None:
    overloaded = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)
    assert encode_error(overloaded, Options()).headers == (("Retry-After", "7"),)
    assert encode_error(NotReadyError("", retry_after=5), Options()).headers == (("Retry-After", "5"),)
    assert encode_error(NotReadyError(""), Options()).headers == ()
    assert encode_error(MethodNotAllowedError("", allow="GET"), Options()).headers == (("Allow", "GET"),)


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
