from __future__ import annotations

import json

import pytest

from djl_trtllm.api.tgi.errors import encode_error
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    GenerationError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnknownModelError,
)

ROWS: list[tuple[RequestError, int, str]] = [
    (PromptTooLongError("no"), 422, "validation"),
    (UnknownModelError("no", name="hen"), 404, "validation"),
    (MethodNotAllowedError("no", allow="POST"), 405, "validation"),
    (RequestTooLargeError("no"), 413, "validation"),
    (OverloadedError("no", queue_depth=1, capacity=1, retry_after=7), 429, "overloaded"),
    (NotReadyError("no", retry_after=5), 503, "unhealthy"),
    (RequestTimeoutError("no"), 500, "incomplete_generation"),
    (GenerationError("no"), 424, "generation"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ROWS, ids=lambda value: type(value).__name__)
def test_every_error_has_tgis_status_and_type(error: RequestError, status: int, kind: str) -> None:
    reply = encode_error(error, Options())
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "no", "error_type": kind})
    expected = {405: {"Allow": "POST"}, 429: {"Retry-After": "7"}, 503: {"Retry-After": "5"}}.get(status, {})
    assert dict(reply.headers) == expected


def test_a_defect_keeps_its_secret() -> None:
    reply = encode_error(KeyError("secret"), Options(server_error_http_code=555))
    body = {"error": "Internal server error, see the server's log.", "error_type": "generation"}
    assert (reply.status, json.loads(reply.body)) == (555, body)
