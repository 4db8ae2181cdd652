"""The errors of SageMaker's runtime."""

from __future__ import annotations

import orjson
import pytest

from djl_trtllm.api.base import Reply
from djl_trtllm.api.endpoint_errors import endpoint_error
from djl_trtllm.errors import InvalidRequestError, MethodNotAllowedError, UnknownModelError

REFUSED = InvalidRequestError("no")


@pytest.mark.parametrize(("status", "side"), [(400, "client"), (424, "client"), (499, "client"), (500, "server")])
def test_a_models_error_is_inside_sagemakers(status: int, side: str) -> None:
    content = '{"error": "\u00e9 too long"}'
    reply = endpoint_error(REFUSED, Reply(status, "application/json", f"{content}\n".encode(), (("Retry-After", "3"),)))
    assert (reply.status, reply.content_type) == (424, "application/json")
    assert reply.headers == (("Retry-After", "3"), ("x-amzn-errortype", "ModelError"))
    assert orjson.loads(reply.body) == {
        "Message": f'Received {side} error ({status}) from primary with message "{content}"',
        "OriginalMessage": content,
        "OriginalStatusCode": status,
    }


def test_a_body_that_is_no_text_is_passed_on_as_far_as_it_is() -> None:
    reply = endpoint_error(REFUSED, Reply(500, "application/octet-stream", b"a\xff"))
    assert orjson.loads(reply.body)["OriginalMessage"] == "a\ufffd"


def test_an_unknown_endpoint_is_a_validation_error() -> None:
    own = Reply.json({"code": 404}, 404)
    reply = endpoint_error(UnknownModelError("there is none", name="story"), own)
    assert (reply.status, orjson.loads(reply.body)) == (400, {"Message": "there is none"})
    assert reply.headers == (("x-amzn-errortype", "ValidationError"),)


def test_a_defect_is_a_servers_error_and_a_wrong_method_stays_as_it_is() -> None:
    assert orjson.loads(endpoint_error(KeyError("x"), Reply.json({}, 500)).body)["OriginalStatusCode"] == 500
    own = Reply.json({"code": 405}, 405)
    assert endpoint_error(MethodNotAllowedError("no", allow="POST"), own) is own
