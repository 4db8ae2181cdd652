from __future__ import annotations

import json

import pytest

from djl_trtllm.api.triton.errors import encode_error, status_of
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

ROWS: list[tuple[RequestError, str, int]] = [
    (InvalidRequestError("no"), "INVALID_ARG", 400),
    (PromptTooLongError("no"), "INVALID_ARG", 400),
    (UnsupportedParameterError("no"), "INVALID_ARG", 400),
    (UnknownAdapterError("no"), "NOT_FOUND", 404),
    (UnknownModelError("no", name="hen"), "NOT_FOUND", 404),
    (MethodNotAllowedError("no", allow="POST"), "INVALID_ARG", 405),
    (RequestTooLargeError("no"), "INVALID_ARG", 400),
    (OverloadedError("no", queue_depth=1, capacity=1, retry_after=7), "UNAVAILABLE", 503),
    (NotReadyError("no", retry_after=5), "UNAVAILABLE", 503),
    (RequestTimeoutError("no"), "UNAVAILABLE", 503),
    (GenerationError("no"), "INTERNAL", 500),
]


@pytest.mark.parametrize(("error", "name", "status"), ROWS, ids=lambda value: type(value).__name__)
def test_every_error_has_tritons_status(error: RequestError, name: str, status: int) -> None:
    assert status_of(error) == (name, status)
    reply = encode_error(error, Options())
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "no"})
    headers = {"OverloadedError": {"Retry-After": "7"}, "NotReadyError": {"Retry-After": "5"}}
    expected = headers.get(type(error).__name__, {"Allow": "POST"} if status == 405 else {})
    assert dict(reply.headers) == expected


def test_a_defect_is_internal_and_keeps_its_secret() -> None:
    assert status_of(KeyError("secret")).name == "INTERNAL"
    reply = encode_error(KeyError("secret"), Options(server_error_http_code=555))
    body = {"error": "Internal server error, see the server's log."}
    assert (reply.status, json.loads(reply.body)) == (555, body)
