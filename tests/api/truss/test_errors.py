from __future__ import annotations

import json

import pytest

from djl_trtllm.api.truss.errors import encode_error
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    RequestError,
)
from tests.api.error_rows import headers_of, rows

ROWS = rows(
    PromptTooLongError=(400, "700"),
    UnknownModelError=(404, "500"),
    MethodNotAllowedError=(405, "700"),
    RequestTooLargeError=(413, "700"),
    OverloadedError=(429, "500"),
    TooManyRequestsError=(429, "500"),
    NotReadyError=(503, "500"),
    RequestTimeoutError=(504, "600"),
    GenerationError=(500, "600"),
)


@pytest.mark.parametrize(("error", "status", "code"), ROWS)
def test_every_error_has_its_status_and_basetens_code(error: RequestError, status: int, code: str) -> None:
    reply = encode_error(error, Options())
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "no"})
    headers = dict(reply.headers)
    assert (headers.pop("X-BASETEN-ERROR-SOURCE"), headers.pop("X-BASETEN-ERROR-CODE")) == ("04", code)
    assert headers == headers_of(error)


def test_a_defect_is_the_servers() -> None:
    reply = encode_error(KeyError("x"), Options(server_error_http_code=599))
    assert (reply.status, dict(reply.headers)["X-BASETEN-ERROR-CODE"]) == (599, "500")


def test_a_defect_keeps_its_secret() -> None:
    reply = encode_error(KeyError("secret"), Options())
    assert json.loads(reply.body) == {"error": "Internal Server Error, see the server's log."}
