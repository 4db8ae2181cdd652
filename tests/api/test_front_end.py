from __future__ import annotations

import json

import pytest

from djl_trtllm.api.front_end import front_end_error, method_not_allowed


@pytest.mark.parametrize(
    ("status", "djl_type"),
    [
        (400, "BadRequestException"),
        (404, "ResourceNotFoundException"),
        (405, "MethodNotAllowedException"),
        (413, "RequestEntityTooLargeException"),
        (415, "UnsupportedMediaTypeException"),
        (418, "BadRequestException"),
        (503, "ServiceUnavailableException"),
    ],
)
def test_front_end_errors_have_djls_shape(status: int, djl_type: str) -> None:
    answer = front_end_error(status, "no")
    assert (answer.status, answer.content_type, answer.headers) == (status, "application/json", ())
    assert json.loads(answer.body) == {"code": status, "type": djl_type, "message": "no"}
    assert list(json.loads(answer.body)) == ["code", "type", "message"]
    # As DJL prints it: indented, with a line end.
    assert answer.body == json.dumps(json.loads(answer.body), indent=2).encode() + b"\n"


def test_a_front_end_error_may_have_a_type_of_its_own() -> None:
    assert json.loads(front_end_error(404, "no", "ModelNotFoundException").body)["type"] == "ModelNotFoundException"


def test_further_fields_follow_those_that_are_always_there() -> None:
    reply = front_end_error(503, "full", fields={"queue_depth": 7}, headers=(("Retry-After", "1"),))
    assert list(json.loads(reply.body)) == ["code", "type", "message", "queue_depth"]
    assert reply.headers == (("Retry-After", "1"),)


def test_a_method_that_is_not_allowed_comes_with_those_that_are() -> None:
    reply = method_not_allowed("this takes GET and POST", "GET, POST")
    assert (reply.status, reply.headers) == (405, (("Allow", "GET, POST"),))
    assert json.loads(reply.body)["message"] == "this takes GET and POST"
