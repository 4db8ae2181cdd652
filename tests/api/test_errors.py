from __future__ import annotations

import json

import pytest

from djl_trtllm.api.errors import ERRORS, StatusCodes, front_end, reply, tgi_error_type
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    UnsupportedParameterError,
)


def subclasses(of: type[RequestError]) -> list[type[RequestError]]:
    return [found for child in of.__subclasses__() for found in (child, *subclasses(child))]


def make(kind: type[RequestError], message: str) -> RequestError:
    if issubclass(kind, OverloadedError):
        return kind(message, queue_depth=7, capacity=7, retry_after=2)
    return kind(message)


@pytest.mark.parametrize(
    "kind", [kind for kind in subclasses(RequestError) if kind.__module__ == RequestError.__module__]
)
def test_every_request_error_is_mapped(kind: type[RequestError]) -> None:
    assert any(ancestor in ERRORS for ancestor in kind.__mro__)
    answer = reply(make(kind, "what went wrong"))
    assert 400 <= answer.status < 600
    assert answer.content_type == "application/json"
    body = json.loads(answer.body)
    assert body["code"] == answer.status
    assert "what went wrong" in answer.body.decode()
    assert tgi_error_type(make(kind, ""))


@pytest.mark.parametrize("kind", [InvalidRequestError, PromptTooLongError, UnsupportedParameterError, GenerationError])
def test_a_request_that_fails_by_itself_gets_the_handlers_body(kind: type[RequestError]) -> None:
    answer = reply(kind("wrong"))
    assert (answer.status, answer.body) == (424, b'{"error":"wrong","code":424}')


def test_an_overload_tells_the_queue_and_when_to_return() -> None:
    answer = reply(OverloadedError("full", queue_depth=100, capacity=128, retry_after=3))
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
    assert reply(NotReadyError("loading", retry_after=5)).headers == (("Retry-After", "5"),)
    assert reply(NotReadyError("failed")).headers == ()


def test_codes_can_be_changed() -> None:
    codes = StatusCodes(failed=422, throttle=429, not_ready=502, timeout=504, server_error=599)
    errors = [
        InvalidRequestError(""),
        OverloadedError("", queue_depth=0, capacity=0, retry_after=1),
        NotReadyError(""),
        RequestTimeoutError(""),
        ValueError(""),
    ]
    assert [reply(error, codes).status for error in errors] == [422, 429, 502, 504, 599]


def test_a_defect_tells_no_internals() -> None:
    answer = reply(KeyError("secret"))
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert json.loads(answer.body)["type"] == "InternalServerException"


@pytest.mark.parametrize("status", [400, 404, 405, 413, 415])
def test_front_end_errors_have_djls_shape(status: int) -> None:
    answer = front_end(status, "no")
    assert answer.status == status
    assert list(json.loads(answer.body)) == ["code", "type", "message"]
    assert answer.body.endswith(b"\n")
