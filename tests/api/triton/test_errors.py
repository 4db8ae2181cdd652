from __future__ import annotations

import json

import pytest

from djl_trtllm.api.triton.errors import encode_error, status_of
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    RequestError,
)
from tests.api.error_rows import headers_of, rows

ROWS = rows(
    InvalidRequestError=("INVALID_ARG", 400),
    PromptTooLongError=("INVALID_ARG", 400),
    UnsupportedParameterError=("INVALID_ARG", 400),
    UnknownAdapterError=("NOT_FOUND", 404),
    UnknownModelError=("NOT_FOUND", 404),
    MethodNotAllowedError=("INVALID_ARG", 405),
    RequestTooLargeError=("INVALID_ARG", 400),
    OverloadedError=("UNAVAILABLE", 503),
    TooManyRequestsError=("RESOURCE_EXHAUSTED", 429),
    NotReadyError=("UNAVAILABLE", 503),
    RequestTimeoutError=("UNAVAILABLE", 503),
    GenerationError=("INTERNAL", 500),
)


@pytest.mark.parametrize(("error", "name", "status"), ROWS)
def test_every_error_has_tritons_status(error: RequestError, name: str, status: int) -> None:
    assert status_of(error) == (name, status)
    reply = encode_error(error, Options())
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "no"})
    assert dict(reply.headers) == headers_of(error)


def test_a_defect_is_internal_and_keeps_its_secret() -> None:
    assert status_of(KeyError("secret")).name == "INTERNAL"
    reply = encode_error(KeyError("secret"), Options(server_error_http_code=555))
    body = {"error": "Internal server error, see the server's log."}
    assert (reply.status, json.loads(reply.body)) == (555, body)
