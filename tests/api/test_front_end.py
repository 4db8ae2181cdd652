from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from botocore.eventstream import EventStreamBuffer

from djl_trtllm.api import front_end
from djl_trtllm.api.base import Call, Prompt, RawRequest, Reply, ResponseEncoder
from djl_trtllm.api.dialects.lmi.dialect import choose_encoder
from djl_trtllm.api.front_end import (
    CONTENT_TYPE,
    EventStreamEncoder,
    endpoint_error,
    event_stream,
    forwarded,
    front_end_error,
)
from djl_trtllm.api.texts import Presentation
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    RequestError,
    RequestTimeoutError,
    UnknownModelError,
)
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult
from tests.api.models import EOS, FAILED, PROMPT, TOKENS
from tests.support.tables import by_rows, by_table


def test_custom_attributes_become_properties() -> None:
    headers = front_end.by_name(
        [
            ("Content-Type", "application/json"),
            ("X-Amzn-SageMaker-Custom-Attributes", "Trace=abc; k2 = v=2 ;flag;=x;content-type=text/plain"),
        ]
    )
    found = front_end.with_attributes(headers)
    assert "trace" not in headers
    assert found["trace"] == "abc"
    assert found["k2"] == "v=2"
    assert "flag" not in found
    assert "" not in found
    assert found["content-type"] == "application/json"


def test_the_first_of_equal_headers_counts() -> None:
    assert front_end.by_name([("A", "1"), ("a", "2")]) == {"a": "1"}


@by_table("headers", "header", "found")
def test_the_id_of_a_request_is_the_clients_or_sagemakers(headers: dict[str, str], header: str, found: str) -> None:
    assert front_end.request_id(headers, header) == found


def test_request_id_is_generated_where_none_is_usable() -> None:
    for given in ({}, {"x-request-id": ""}, {"x-request-id": "a\r\nb"}, {"x-request-id": "x" * 300}):
        assert uuid.UUID(front_end.request_id(given))


@by_table("accept", "wanted")
def test_accept_says_whether_a_stream_is_events(accept: str, wanted: bool | None) -> None:
    assert front_end.prefers_events({"accept": accept}) is wanted


@by_rows(
    ("agent", "events", "hugging_face"),
    [
        ("unknown/None; hf_hub/1.21.0; python/3", True, True),
        *((agent, True, False) for agent in ("OpenAI/Python 3.54.0", "AsyncOpenAI/JS")),
        *((agent, None, False) for agent in ("curl/8.5", "")),
    ],
)
def test_clients_that_read_only_events_get_events(agent: str, events: bool | None, hugging_face: bool) -> None:
    assert front_end.prefers_events({"accept": "application/json", "user-agent": agent}) is events
    assert front_end.prefers_events({"accept": "application/jsonlines", "user-agent": agent}) is False
    assert front_end.from_hugging_face({"user-agent": agent}) is hugging_face
    assert front_end.prefers_events({}) is None and not front_end.from_hugging_face({})


@by_rows(
    ("given", "returned"),
    [
        *((f" {value} ", value) for value in ("a=b", "x" * 1024, "~ !")),
        ("a=b; X-Api-Key = secret;Authorization=Bearer secret;c=d", "a=b;c=d"),
        *((value, None) for value in ("", "x" * 1025, "\u00e9", "a\tb")),
    ],
)
def test_custom_attributes_that_sagemaker_takes_are_returned_without_keys(given: str, returned: str | None) -> None:
    wanted = () if returned is None else ((front_end.CUSTOM_ATTRIBUTES, returned),)
    assert front_end.returned_attributes({front_end.CUSTOM_ATTRIBUTES: given}) == wanted
    assert front_end.returned_attributes({}) == ()


@by_table("status", "djl_type")
def test_front_end_errors_have_djls_shape(status: int, djl_type: str) -> None:
    answer = front_end_error(status, "no")
    assert (answer.status, answer.content_type, answer.headers) == (status, "application/json", ())
    assert json.loads(answer.body) == {"code": status, "type": djl_type, "message": "no"}
    assert list(json.loads(answer.body)) == ["code", "type", "message"]
    # As DJL prints it: indented, with a line end.
    assert answer.body == json.dumps(json.loads(answer.body), indent=2).encode() + b"\n"


def test_further_fields_follow_those_that_are_always_there() -> None:
    reply = front_end_error(503, "full", "FullException", fields={"queue_depth": 7}, headers=(("Retry-After", "1"),))
    shown = {"code": 503, "type": "FullException", "message": "full", "queue_depth": 7}
    assert list(json.loads(reply.body).items()) == list(shown.items())
    assert reply.headers == (("Retry-After", "1"),)


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


def test_other_errors_are_sagemakers_or_stay_as_they_are() -> None:
    reply = endpoint_error(REFUSED, Reply(500, "application/octet-stream", b"a\xff"))
    assert orjson.loads(reply.body)["OriginalMessage"] == "a\ufffd"  # as far as it is text
    reply = endpoint_error(UnknownModelError("there is none", name="story"), Reply.json({"code": 404}, 404))
    assert (reply.status, orjson.loads(reply.body)) == (400, {"Message": "there is none"})
    assert reply.headers == (("x-amzn-errortype", "ValidationError"),)
    assert orjson.loads(endpoint_error(KeyError("x"), Reply.json({}, 500)).body)["OriginalStatusCode"] == 500
    own = Reply.json({"code": 405}, 405)
    assert endpoint_error(MethodNotAllowedError("no", allow="POST"), own) is own


def events(data: bytes) -> list[tuple[dict[str, Any], bytes]]:
    buffer = EventStreamBuffer()
    buffer.add_data(data)
    return [(event.headers, event.payload) for event in buffer]


def encode(encoder: ResponseEncoder, chunks: Iterable[OutputChunk]) -> bytes:
    encoder.begin(PROMPT)
    return b"".join([encoder.encode(chunk) for chunk in chunks])


def lines(name: str = "jsonlines") -> ResponseEncoder:
    return choose_encoder(name, Presentation(stream=True))


PART = {":message-type": "event", ":event-type": "PayloadPart", ":content-type": "application/octet-stream"}


def exception(kind: str) -> dict[str, str]:
    return {":message-type": "exception", ":exception-type": kind, ":content-type": "application/json"}


class Broken(ResponseEncoder):
    """An encoder that fails at its second chunk; nothing of it can express an error."""

    stream = True
    content_type = "text/plain"
    wants_prompt_tokens = True

    def __init__(self, first: bytes = b"a") -> None:
        self._first: bytes | None = first

    def begin(self, prompt: Prompt) -> None:
        pass

    def encode(self, chunk: OutputChunk) -> bytes:
        if self._first is None:
            raise KeyError("secret")
        first, self._first = self._first, None
        return first

    def error(self, error: RequestError) -> bytes:
        raise AssertionError


@pytest.mark.parametrize(("name", "start", "end"), [("jsonlines", b"", b"\n"), ("sse", b"data: ", b"\n\n")])
def test_each_part_is_one_line_or_event(name: str, start: bytes, end: bytes) -> None:
    several = OutputChunk(0, TOKENS, SequenceResult(FinishReason.LENGTH, len(TOKENS), None, None))
    found = events(encode(EventStreamEncoder(lines(name)), [several]))
    assert len(found) == len(TOKENS)
    assert b"".join(payload for _, payload in found) == encode(lines(name), [several])
    for headers, payload in found:
        assert headers == PART
        assert payload.startswith(start) and payload.endswith(end)
        assert "token" in orjson.loads(payload.removeprefix(start))


def test_a_whole_response_is_one_part_and_a_large_one_several() -> None:
    encoder = EventStreamEncoder(choose_encoder("json", Presentation()))
    assert [orjson.loads(payload)["generated_text"] for _, payload in events(encode(encoder, EOS))]
    large = EventStreamEncoder(Broken(b"x" * (2**20 + 1)))
    assert [len(payload) for _, payload in events(large.encode(EOS[0]))] == [2**20, 1]


@pytest.mark.parametrize(
    ("error", "code"),
    [(GenerationError("why"), "StreamBroken"), (RequestTimeoutError("why"), "ModelInvocationTimeExceeded")],
)
def test_an_error_is_the_models_last_line_and_an_exception(error: RequestError, code: str) -> None:
    end = OutputChunk(0, TOKENS[1:2], SequenceResult(FinishReason.ERROR, 2, None, None, error=error))
    encoder = EventStreamEncoder(lines())
    *parts, (headers, payload) = events(encode(encoder, [*EOS[:1], end]))
    assert b'"error_msg":"why"' in parts[-1][1]
    assert headers == exception("ModelStreamError")
    assert orjson.loads(payload) == {"Message": "why", "ErrorCode": code}
    assert encoder.encode(EOS[1]) == b""


def test_a_format_without_errors_has_the_exception() -> None:
    encoder = EventStreamEncoder(lines("none"))
    sent = encode(encoder, FAILED[:1])
    with pytest.raises(GenerationError) as raised:
        encoder.encode(FAILED[1])
    *_, (headers, payload) = events(sent + encoder.error(raised.value))
    assert headers == exception("ModelStreamError") and orjson.loads(payload)["ErrorCode"] == "StreamBroken"


def test_a_defect_is_an_internal_failure_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    encoder = EventStreamEncoder(Broken())
    sent = encoder.encode(EOS[0])
    with caplog.at_level(logging.ERROR), pytest.raises(GenerationError) as raised:
        encoder.encode(EOS[1])
    assert "secret" in caplog.text
    _, (headers, payload) = events(sent + encoder.error(raised.value))
    assert headers == exception("InternalStreamFailure")
    assert orjson.loads(payload) == {"Message": "Internal server error, see the server's log."}


def test_a_defect_before_the_first_byte_is_the_servers() -> None:
    encoder = EventStreamEncoder(Broken(b""))
    assert encoder.encode(EOS[0]) == b""
    with pytest.raises(KeyError):
        encoder.encode(EOS[1])


def test_the_call_says_what_is_inside() -> None:
    call = event_stream(Call((), lines("sse"), (("a", "b"),)))
    assert call.headers == (("a", "b"), ("X-Amzn-SageMaker-Content-Type", "text/event-stream"))
    assert (call.encoder.content_type, call.encoder.stream) == (CONTENT_TYPE, True)
    assert not call.encoder.wants_prompt_tokens and EventStreamEncoder(Broken()).wants_prompt_tokens


def test_the_container_gets_the_accept_of_the_model() -> None:
    given = {"accept": CONTENT_TYPE, "x-amzn-sagemaker-accept": "text/event-stream", "a": "b"}
    request = RawRequest(b"x", given, "/p", {"endpoint": "story"}, {"q": "1"})
    found = forwarded(request)
    assert found.properties == {
        "a": "b",
        "accept": "text/event-stream",
        "x-amzn-sagemaker-forwarded-api": "InvokeEndpointWithResponseStream",
    }
    assert (found.body, found.path, found.parameters, found.query) == (b"x", "/p", {"endpoint": "story"}, {"q": "1"})
    assert forwarded(RawRequest(b"", {"accept": CONTENT_TYPE})).properties["accept"] == ""
