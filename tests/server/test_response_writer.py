"""The answer to one request: what its client sees of each chunk."""

from __future__ import annotations

import asyncio
import logging

import pytest

from djl_trtllm.api import Call
from djl_trtllm.errors import GenerationError, InvalidRequestError, OverloadedError
from djl_trtllm.logs.context import request_id_of
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling
from djl_trtllm.server.exchange import Exchange
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.server.response_writer import ResponseWriter
from tests.server.answered import OPTIONS, Answered
from tests.support.asgi import Connection
from tests.support.virtual_time import in_virtual_time
from tests.support.word_encoder import WordEncoder, chunk

# -- a client that reads -----------------------------------------------------------------------------------------------


@in_virtual_time
async def test_every_chunk_is_sent_at_once() -> None:
    answered = Answered()
    await answered.settle()
    answered.deliver(chunk("a"))
    assert (answered.client.status, answered.client.parts) == (200, [b"a"])
    assert answered.client.headers["content-type"] == "text/words"
    assert "content-length" not in answered.client.headers
    answered.deliver(chunk(" wolf"))
    assert answered.client.parts == [b"a", b" wolf"]
    assert not answered.client.complete
    await answered.settle()
    assert not answered.task.done()
    answered.deliver(chunk(ends=True))
    await answered.sees(b"a", b" wolf", b".", complete=True)


@in_virtual_time
async def test_only_the_first_and_the_last_part_are_messages_of_asgi() -> None:
    answered = Answered()
    answered.deliver(chunk("a"), chunk(" wolf"), chunk(" is"))
    answered.client.stop_reading()
    answered.deliver(chunk(" here"), chunk(" now"))
    answered.client.read_on()
    await answered.settle()
    assert answered.client.written == [b" wolf", b" is", b" now"]
    answered.deliver(chunk(ends=True))
    await answered.sees(b"a", b" wolf", b" is", b" here", b" now", b".", complete=True)


@in_virtual_time
async def test_the_connection_does_not_keep_an_answer_that_is_complete_before_anybody_waits_for_it() -> None:
    client = Connection("POST", "/invocations")
    exchange = Exchange(client.scope, client.receive, client.send, OPTIONS, ServerCounts())
    writer = ResponseWriter(Call((GenerationRequest(sampling=Sampling()),), WordEncoder()), exchange)
    writer.deliver(chunk("a"))
    writer.deliver(chunk(ends=True))
    assert client.complete
    kept = client._lost
    await writer.until_closed()
    assert client._lost is kept


@in_virtual_time
async def test_a_server_that_only_has_asgi_sends_the_same() -> None:
    answered = Answered(extensions=False)
    answered.deliver(chunk("a"), chunk(" wolf"), chunk(), chunk(ends=True))
    await answered.sees(b"a", b" wolf", b".", complete=True)


@pytest.mark.parametrize("listens", [False, True])
@in_virtual_time
async def test_a_client_that_leaves_ends_its_answer_in_every_server(listens: bool) -> None:
    answered = Answered(extensions=not listens)
    answered.deliver(chunk("a"))
    answered.client.upload(b"", more=True)
    await answered.settle()
    assert not answered.task.done()
    answered.client.leave()
    await answered.settle()
    assert answered.task.done()


@in_virtual_time
async def test_an_answer_that_is_sent_at_once_has_its_length() -> None:
    answered = Answered(WordEncoder(stream=False))
    answered.deliver(chunk("a"))
    assert answered.client.sent == []
    answered.deliver(chunk(" wolf", ends=True))
    await answered.sees(b"a wolf.", complete=True)
    assert answered.client.headers["content-length"] == "7"


@in_virtual_time
async def test_a_chunk_without_bytes_sends_nothing() -> None:
    answered = Answered()
    answered.deliver(chunk())
    assert answered.client.sent == []
    answered.deliver(chunk("a"), chunk())
    assert len(answered.client.sent) == 2
    answered.deliver(chunk(ends=True))
    await answered.sees(b"a", b".", complete=True)


@in_virtual_time
async def test_an_answer_is_complete_when_all_its_sequences_are() -> None:
    answered = Answered(sequences=2)
    answered.deliver(chunk("a", ends=True, index=1))
    assert not answered.client.complete
    answered.deliver(chunk("b", ends=True))
    await answered.sees(b"a.", b"b.", complete=True)


@in_virtual_time
async def test_an_end_without_bytes_ends_the_body() -> None:
    class Silent(WordEncoder):
        def encode(self, chunk: OutputChunk) -> bytes:
            return b"" if chunk.finished is not None else super().encode(chunk)

    answered = Answered(Silent())
    answered.deliver(chunk("a"), chunk(ends=True))
    await answered.sees(b"a", complete=True)


# -- errors ------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_an_error_before_anything_was_sent_is_a_status() -> None:
    answered = Answered()
    answered.deliver(chunk(error=OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)))
    await asyncio.wait_for(answered.task, 1)
    assert (answered.client.status, answered.client.headers["retry-after"]) == (503, "7")
    assert answered.client.complete


@in_virtual_time
async def test_an_error_of_a_later_sequence_before_anything_was_sent_is_a_status_too() -> None:
    answered = Answered(WordEncoder(stream=False), sequences=2)
    answered.deliver(chunk(error=GenerationError("the engine failed"), index=1))
    await asyncio.wait_for(answered.task, 1)
    assert answered.client.status == 424
    answered.deliver(chunk("a", ends=True))
    assert answered.client.json == {"error": "the engine failed", "code": 424}


@in_virtual_time
async def test_an_error_in_a_stream_is_encoded_as_its_dialect_does() -> None:
    answered = Answered()
    answered.deliver(chunk("a"), chunk(" wolf", error=GenerationError("the engine failed")))
    await answered.sees(b"a", b" wolf?", complete=True)


@in_virtual_time
async def test_what_a_chunk_brings_beside_an_error_of_its_own_sequence_goes_on() -> None:
    answered = Answered(sequences=2)
    answered.deliver(chunk("a"), chunk(error=GenerationError("the engine failed")), chunk("b", index=1))
    assert answered.client.parts == [b"a", b"?", b"b"]
    answered.deliver(chunk(ends=True, index=1))
    await answered.sees(b"a", b"?", b"b", b".", complete=True)


@in_virtual_time
async def test_a_formatter_that_refuses_before_anything_was_sent_is_a_status(caplog: pytest.LogCaptureFixture) -> None:
    answered = Answered()
    answered.encoder.failure = InvalidRequestError("no such field")
    answered.deliver(chunk("a"))
    await asyncio.wait_for(answered.task, 1)
    assert (answered.client.status, answered.client.json["error"]) == (424, "no such field")
    assert caplog.records == []


@in_virtual_time
async def test_a_formatter_that_refuses_in_a_stream_has_its_last_word() -> None:
    answered = Answered()
    answered.deliver(chunk("a"))
    answered.encoder.failure = InvalidRequestError("no such field")
    answered.deliver(chunk("b"))
    await answered.sees(b"a", b"!", complete=True)


@in_virtual_time
async def test_a_stream_that_cannot_tell_of_an_error_does_not_end() -> None:
    answered = Answered(WordEncoder(last=b""))
    answered.deliver(chunk("a"))
    answered.encoder.failure = InvalidRequestError("no such field")
    answered.deliver(chunk("b"))
    await answered.sees(b"a", complete=False)


@pytest.mark.parametrize("begun", [True, False])
@in_virtual_time
async def test_a_defect_is_for_the_log_and_not_for_the_client(caplog: pytest.LogCaptureFixture, begun: bool) -> None:
    answered = Answered()
    if begun:
        answered.deliver(chunk("a"))
    answered.encoder.failure = KeyError("secret")
    answered.deliver(chunk("b"))
    await asyncio.wait_for(answered.task, 1)
    assert (answered.client.status, answered.client.complete) == ((200, False) if begun else (500, True))
    assert answered.answer._exchange.served.error == "KeyError"
    assert b"secret" not in answered.client.body
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "secret" in caplog.text and answered.answer._exchange.request_id == request_id_of(record)


@in_virtual_time
async def test_what_comes_after_the_end_is_dropped() -> None:
    answered = Answered()
    answered.encoder.failure = InvalidRequestError("no such field")
    answered.deliver(chunk("a"))
    answered.encoder.failure = None
    answered.deliver(chunk("b"), chunk(ends=True))
    await asyncio.wait_for(answered.task, 1)
    assert answered.client.status == 424
    assert len(answered.client.sent) == 2
