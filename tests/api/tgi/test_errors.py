from __future__ import annotations

import json

import pytest

from djl_trtllm.api.tgi.errors import encode_error
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    RequestError,
)
from tests.api.error_rows import headers_of, rows

ROWS = rows(
    PromptTooLongError=(422, "validation"),
    UnknownModelError=(404, "validation"),
    MethodNotAllowedError=(405, "validation"),
    RequestTooLargeError=(413, "validation"),
    OverloadedError=(429, "overloaded"),
    TooManyRequestsError=(429, "overloaded"),
    NotReadyError=(503, "unhealthy"),
    RequestTimeoutError=(500, "incomplete_generation"),
    GenerationError=(424, "generation"),
)


@pytest.mark.parametrize(("error", "status", "kind"), ROWS)
def test_every_error_has_tgis_status_and_type(error: RequestError, status: int, kind: str) -> None:
    reply = encode_error(error, Options())
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "no", "error_type": kind})
    assert dict(reply.headers) == headers_of(error)


def test_a_defect_keeps_its_secret() -> None:
    reply = encode_error(KeyError("secret"), Options(server_error_http_code=555))
    body = {"error": "Internal server error, see the server's log.", "error_type": "generation"}
    assert (reply.status, json.loads(reply.body)) == (555, body)
