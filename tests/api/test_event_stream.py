"""Responses inside AWS's event stream, read by botocore."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import orjson
import pytest
from botocore.eventstream import EventStreamBuffer

from djl_trtllm.api import Call, Prompt, RawRequest, ResponseEncoder
from djl_trtllm.api.event_stream import CONTENT_TYPE, EventStreamEncoder, event_stream, forwarded
from djl_trtllm.api.lmi.parse import choose_encoder
from djl_trtllm.api.lmi.presentation import Presentation
from djl_trtllm.errors import GenerationError, RequestError, RequestTimeoutError
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult
from tests.api.scripts import EOS, FAILED, PROMPT, TOKENS


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


class Broken:
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


def test_the_parts_join_to_the_response() -> None:
    found = events(encode(EventStreamEncoder(lines()), EOS))
    assert all(headers == PART for headers, _ in found)
    assert b"".join(payload for _, payload in found) == encode(lines(), EOS)


@pytest.mark.parametrize(("name", "start", "end"), [("jsonlines", b"", b"\n"), ("sse", b"data: ", b"\n\n")])
def test_each_part_is_one_line_or_event(name: str, start: bytes, end: bytes) -> None:
    several = OutputChunk(0, TOKENS, SequenceResult(FinishReason.LENGTH, len(TOKENS), None, None))
    found = events(encode(EventStreamEncoder(lines(name)), [several]))
    assert len(found) == len(TOKENS)
    for _, payload in found:
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
