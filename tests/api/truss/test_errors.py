from __future__ import annotations

import json

import pytest

from djl_trtllm.api.truss.errors import encode_error
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
    (PromptTooLongError("no"), 400, "700"),
    (UnknownModelError("no", name="hen"), 404, "500"),
    (MethodNotAllowedError("no", allow="POST"), 405, "700"),
    (RequestTooLargeError("no"), 413, "700"),
    (OverloadedError("no", queue_depth=1, capacity=1, retry_after=7), 429, "500"),
    (NotReadyError("no", retry_after=5), 503, "500"),
    (RequestTimeoutError("no"), 504, "600"),
    (GenerationError("no"), 500, "600"),
]


@pytest.mark.parametrize(("error", "status", "code"), ROWS, ids=lambda value: type(value).__name__)
def test_every_error_has_its_status_and_basetens_code(error: RequestError, status: int, code: str) -> None:
    reply = encode_error(error, Options())
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "no"})
    headers = dict(reply.headers)
    assert (headers.pop("X-BASETEN-ERROR-SOURCE"), headers.pop("X-BASETEN-ERROR-CODE")) == ("04", code)
    assert headers == {405: {"Allow": "POST"}, 429: {"Retry-After": "7"}, 503: {"Retry-After": "5"}}.get(status, {})


def test_a_defect_is_the_servers() -> None:
    reply = encode_error(KeyError("x"), Options(server_error_http_code=599))
    assert (reply.status, dict(reply.headers)["X-BASETEN-ERROR-CODE"]) == (599, "500")


def test_a_defect_keeps_its_secret() -> None:
    reply = encode_error(KeyError("secret"), Options())
    assert json.loads(reply.body) == {"error": "Internal Server Error, see the server's log."}
