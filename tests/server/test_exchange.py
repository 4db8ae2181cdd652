"""One HTTP request and its response: what its client sees of each chunk."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from djl_trtllm.api.base import Call, Reply
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    ConfigError,
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestTooLargeError,
    TooManyRequestsError,
)
from djl_trtllm.logs import request_id_of
from djl_trtllm.request import GenerationRequest, OutputChunk, Sampling
from djl_trtllm.server.context import BodyMemory, ServerContext
from djl_trtllm.server.exchange import CONNECTION, ClientGone, Exchange, ResponseWriter, start_now
from djl_trtllm.telemetry import Telemetry
from tests.support.asgi import Connection
from tests.support.models import WordEncoder, chunk
from tests.support.tables import by_rows, by_table

# How much memory the bodies of requests may have.


def test_one_body_may_have_half_of_the_memory() -> None:
    memory = BodyMemory(100)
    assert memory.take(0, 30)
    assert memory.take(30, 20)
    assert not memory.take(50, 1)
    assert memory.used == 50
    assert not BodyMemory(100).take(0, 51)


def test_a_body_may_have_what_is_free_after_it() -> None:
    memory = BodyMemory(100)
    assert memory.take(0, 50)
    assert memory.take(0, 25)
    assert not memory.take(25, 1)
    assert memory.take(0, 12)
    assert memory.used == 87
    memory.release(50)
    assert memory.take(0, 31)
    assert BodyMemory().take(0, 1 << 60)


def test_a_block_holds_a_body_and_releases_it_whatever_happens() -> None:
    memory = BodyMemory(100)
    with pytest.raises(KeyError), memory.holding(50):
        assert memory.used == 50
        with (
            pytest.raises(OverloadedError, match="have 50 of max_body_memory=100 bytes") as refused,
            memory.holding(26),
        ):
            pytest.fail("there is no room")
        assert (refused.value.queue_depth, refused.value.capacity, refused.value.retry_after) == (50, 100, 1)
        raise KeyError
    assert memory.used == 0


def test_bodies_and_clients_have_the_bounds_of_the_options() -> None:
    context = ServerContext(Options(max_body_memory=1000, max_requests_per_client=1))
    assert context.bodies.limit == 1000
    context.clients.enter("a")
    with pytest.raises(TooManyRequestsError):
        context.clients.enter("a")


def test_what_the_options_say_of_access_is_read_when_it_is_opened(tmp_path: Path) -> None:
    assert not ServerContext.open(Options()).access.keys
    with pytest.raises(ConfigError, match="nowhere"):
        ServerContext.open(Options(api_keys_file=tmp_path / "nowhere"))


OPTIONS = Options(max_request_size=10, request_id_header_key="X-Trace", throttle_error_http_code=529)


class Pair:
    """A client's connection, and the exchange at its other end."""

    def __init__(
        self,
        body: bytes | None = b"",
        headers: Mapping[str, str] | None = None,
        query: str = "",
        memory: BodyMemory | None = None,
    ) -> None:
        self.client = Connection("POST", "/invocations", body, headers or {}, query)
        context = ServerContext(OPTIONS)
        context.bodies = memory or context.bodies
        self.counts = context.counts
        self.exchange = Exchange(self.client.scope, self.client.receive, self.client.send, context)


# -- the request -------------------------------------------------------------------------------------------------------


async def test_headers_and_custom_attributes_are_properties() -> None:
    exchange = Pair(headers={"X-Color": "red", "X-Amzn-SageMaker-Custom-Attributes": "size=7"}).exchange
    assert (exchange.properties["x-color"], exchange.properties["size"]) == ("red", "7")
    assert (exchange.headers["x-color"], "size" in exchange.headers) == ("red", False)


async def test_the_request_id_is_that_of_the_configured_header_or_new() -> None:
    assert Pair(headers={"x-trace": "story-1"}).exchange.request_id == "story-1"
    ids = {Pair(headers={"x-request-id": "other"}).exchange.request_id for _ in range(2)}
    assert [len(each) for each in ids] == [36, 36]


async def test_of_parameters_given_twice_the_first_counts() -> None:
    exchange = Pair(query="name=a%20wolf&name=fox&empty=").exchange
    assert exchange.query == {"name": "a wolf", "empty": ""}


# -- its body ----------------------------------------------------------------------------------------------------------


async def test_a_body_may_come_in_parts_and_takes_memory_until_it_is_released() -> None:
    memory = BodyMemory(12)
    pair = Pair(None, memory=memory)
    for part in (b"a wo", b""):
        pair.client.upload(part, more=True)
    pair.client.upload(b"lf")
    assert await pair.exchange.body() == b"a wolf"
    assert memory.used == 6
    pair.exchange.release()
    pair.exchange.release()
    assert memory.used == 0


async def test_a_body_that_needs_more_memory_than_there_is_is_refused() -> None:
    memory = BodyMemory(11)
    pair = Pair(None, memory=memory)
    pair.client.upload(b"a wo", more=True)
    pair.client.upload(b"lf")
    with pytest.raises(OverloadedError, match="have 4 of max_body_memory=11 bytes") as caught:
        await pair.exchange.body()
    assert (caught.value.retry_after, caught.value.queue_depth, caught.value.capacity) == (1, 4, 11)
    assert memory.used == 4
    pair.exchange.release()
    assert memory.used == 0


async def test_a_body_ends_with_the_message_that_does_not_say_that_there_is_more() -> None:
    pair = Pair(b"a wolf")
    message = await pair.exchange.receive()
    del message["more_body"]

    async def receive() -> object:
        return message

    pair.exchange.receive = receive  # type: ignore[assignment]
    assert await pair.exchange.body() == b"a wolf"
    del message["body"]
    assert await pair.exchange.body() == b""


@pytest.mark.parametrize(("size", "fits"), [(10, True), (11, False)])
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_has_at_most_max_request_size_bytes(size: int, fits: bool, declared: bool) -> None:
    content = b"x" * size
    pair = Pair(content, {"content-length": str(size)} if declared else {})
    with nullcontext() if fits else pytest.raises(RequestTooLargeError, match="larger than max_request_size="):
        assert await pair.exchange.body() == content


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    pair = Pair(None, {"content-length": "11"})
    with pytest.raises(RequestTooLargeError, match="larger than max_request_size="):
        await pair.exchange.body()


@pytest.mark.parametrize("length", ["eleven", "¹¹"])
async def test_a_length_that_is_no_number_is_no_length(length: str) -> None:
    assert await Pair(b"a wolf", {"content-length": length}).exchange.body() == b"a wolf"


async def test_what_is_too_large_is_read_no_further() -> None:
    pair = Pair(None)
    pair.client.upload(b"x" * 11, more=True)
    with pytest.raises(RequestTooLargeError, match="larger than max_request_size="):
        await pair.exchange.body()


async def test_a_client_may_go_in_the_middle_of_its_body() -> None:
    pair = Pair(None)
    pair.client.upload(b"a wo", more=True)
    pair.client.leave()
    with pytest.raises(ClientGone):
        await pair.exchange.body()


# -- the answer --------------------------------------------------------------------------------------------------------


async def test_a_reply_is_whole_and_counted_with_its_route_and_its_model() -> None:
    pair = Pair(headers={"x-trace": "story-1"})
    pair.exchange.route, pair.exchange.model = "/v1/completions", "story"
    before = pair.exchange.sent_head
    await pair.exchange.reply(Reply(201, "text/plain", b"a wolf", (("Allow", "GET"),)))
    assert (before, pair.exchange.sent_head) == (False, True)
    assert (pair.client.status, pair.client.body, pair.client.complete) == (201, b"a wolf", True)
    assert pair.client.headers == {
        "content-type": "text/plain",
        "x-trace": "story-1",
        "allow": "GET",
        "content-length": "6",
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
    }
    assert pair.counts.responses == {(201, "/v1/completions", "story"): 1}


async def test_an_error_has_the_status_that_the_options_say_and_the_headers_it_needs() -> None:
    pair = Pair()
    error = OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)
    await pair.exchange.fail(error, (("Connection", "close"),))
    assert pair.client.status == 529
    assert (pair.client.headers["retry-after"], pair.client.headers["connection"]) == ("7", "close")
    assert pair.client.json["queue_depth"] == 1
    other = Pair()
    await other.exchange.fail(NotReadyError("loading"))
    assert (other.client.status, "connection" in other.client.headers) == (503, False)


async def test_a_connection_is_dropped_where_the_server_can_do_so() -> None:
    pair = Pair()
    pair.exchange.abort()
    assert pair.client.aborted
    bare = Pair()
    del bare.client.scope[CONNECTION]
    bare.exchange.abort()
    assert not bare.client.aborted


async def test_a_response_that_goes_on_without_its_handler_keeps_no_headers() -> None:
    pair = Pair(headers={"x-trace": "r-1"})
    rest = asyncio.get_running_loop().create_future()
    assert pair.exchange.properties
    pair.exchange.go_on(rest)
    assert (pair.exchange.rest, pair.exchange.properties, pair.exchange.served.headers) == (rest, {}, {})


async def test_a_trace_has_the_headers_of_a_request_that_goes_on_without_its_handler() -> None:
    pair = Pair(headers={"traceparent": "00"})
    pair.exchange.context.telemetry = Telemetry(traces=cast(Any, object()))
    headers = pair.exchange.properties
    pair.exchange.go_on(asyncio.get_running_loop().create_future())
    assert (pair.exchange.properties, pair.exchange.served.headers) == ({}, headers)


@pytest.mark.parametrize("begun", [False, True])
async def test_at_the_end_what_is_done_for_a_request_ends_and_it_is_reported(begun: bool) -> None:
    ended: list[object] = []
    pair = Pair(b"12345678")
    exchange = pair.exchange
    exchange.context.telemetry = cast(Any, SimpleNamespace(ended=ended.append))
    await exchange.body()
    if begun:
        exchange.caller = cast(Any, SimpleNamespace(leave=lambda: ended.append("left")))
        exchange.service = cast(Any, SimpleNamespace(cancel=ended.append))
    assert exchange.context.bodies.used == 8
    exchange.end()
    assert ended == [*([exchange.served.generations, "left"] if begun else []), exchange.served]
    assert exchange.context.bodies.used == 0


WRITING = Options(stream_write_timeout=30.0)
FAILURES = {"REFUSE": InvalidRequestError("no such field"), "BREAK": KeyError("secret"), "WORK": None}


class Answered:
    """A request whose response is delivered by the test, and its client."""

    def __init__(self, encoder: WordEncoder | None = None, *, sequences: int = 1, ours: bool = True) -> None:
        """`ours`: the ASGI server is ours, and can do more than ASGI says."""
        self.client = Connection("POST", "/invocations")
        if not ours:
            del self.client.scope[CONNECTION]
        self.exchange = Exchange(self.client.scope, self.client.receive, self.client.send, ServerContext(WRITING))
        self.encoder = encoder or WordEncoder()
        call = Call((GenerationRequest(sampling=Sampling(n=sequences)),), self.encoder)
        self.writer = ResponseWriter(call, self.exchange)
        self.task = self.writer.until_closed()

    async def plays(self, script: str) -> Answered:
        """Do the steps of a script, in order.

        "a" is a chunk, "a." the last of its sequence, "a?" one that ends with an error, "1:a" one of the second
        sequence, "_" none. "|" the client stops reading, ">" it reads on, "<" it leaves, "x" its connection breaks, and
        30.0 is a time that passes. REFUSE, BREAK and WORK are what the encoder does from then on.
        """
        for step in script.split():
            if step in FAILURES:
                self.encoder.failure = FAILURES[step]
            elif re.fullmatch(r"[\d.]+\d", step):
                await asyncio.sleep(float(step))
            elif step in "|><x":
                client = self.client
                {"|": client.stop_reading, ">": client.read_on, "<": client.leave, "x": client.vanish}[step]()
                await asyncio.sleep(0.001)
            else:
                text = step.partition(":")[2] if ":" in step else step
                error = GenerationError("the engine failed") if text.endswith("?") else None
                index = 1 if ":" in step else 0
                self.writer.deliver(chunk(text.strip("_.?"), ends=text.endswith("."), error=error, index=index))
        await asyncio.sleep(0.001)
        return self

    @property
    def state(self) -> str:
        return "open" if not self.task.done() else "complete" if self.client.complete else "broken"

    async def close(self) -> None:
        self.client.leave()
        await self.task
        await asyncio.sleep(0.001)


@by_rows("ours", [True, False])
@by_table("script", "parts", "state")
async def test_what_a_client_sees_of_a_stream(script: str, parts: str, state: str, ours: bool) -> None:
    answered = await Answered(ours=ours).plays(script)
    assert ([part.decode() for part in answered.client.parts], answered.state) == (parts.split(), state)
    if parts:
        assert (answered.client.status, answered.client.headers["content-type"]) == (200, "text/words")
        assert ("content-length" in answered.client.headers) == (parts == "a.")  # known with its first part
    await answered.close()


@by_table("script", "parts", "state")
async def test_a_response_is_complete_when_both_its_sequences_are(script: str, parts: str, state: str) -> None:
    answered = await Answered(sequences=2).plays(script)
    assert ([part.decode() for part in answered.client.parts], answered.state) == (parts.split(), state)
    await answered.close()


async def test_only_the_first_and_the_last_part_are_messages_of_asgi() -> None:
    answered = await Answered().plays("a wolf is | here now >")
    assert answered.client.written == [b"wolf", b"is", b"now"]
    await answered.plays(".")
    assert (answered.client.body, answered.state) == (b"awolfisherenow.", "complete")


class RepeatingEncoder(WordEncoder):
    """All words so far, and how many times it was asked for them."""

    repeats = True

    def encode(self, chunk: OutputChunk) -> bytes:
        self.said = getattr(self, "said", b"") + super().encode(chunk)
        return self.said + b" "


async def test_of_texts_that_repeat_those_before_one_is_sent_to_a_client_that_did_not_read() -> None:
    answered = await Answered(RepeatingEncoder()).plays("a | b c d >")
    assert answered.client.body == b"a ab abcd "
    await answered.plays("| e f. >")
    assert (answered.client.body, answered.state) == (b"a ab abcd abcde abcdef. ", "complete")


async def test_a_whole_response_has_its_length() -> None:
    answered = await Answered(WordEncoder(stream=False)).plays("a")
    assert answered.client.sent == []
    await answered.plays("wolf.")
    assert (answered.client.body, answered.client.headers["content-length"], answered.state) == (
        b"awolf.",
        "6",
        "complete",
    )


@by_table("content_type", "begun", "comment", "header")
async def test_a_seeded_response_whose_engine_was_replaced_says_so(
    content_type: str, begun: bool, comment: bool, header: bool
) -> None:
    encoder = WordEncoder()
    encoder.content_type = content_type
    answered = Answered(encoder)
    if begun:
        await answered.plays("a")
    last = chunk("b", ends=True)
    assert last.finished is not None
    answered.writer.deliver(replace(last, finished=replace(last.finished, reseeded=True)))
    await asyncio.sleep(0.001)
    assert (b"\n\n" in answered.client.body) == answered.client.body.startswith(b"a: ") == comment
    assert ("warning" in answered.client.headers) == header
    assert (answered.client.body[-2:], answered.state) == (b"b.", "complete")


async def test_an_end_without_bytes_ends_the_body_and_an_error_without_bytes_does_not() -> None:
    class Silent(WordEncoder):
        def encode(self, chunk: Any) -> bytes:
            return b"" if chunk.finished is not None else super().encode(chunk)

    assert (await Answered(Silent()).plays("a .")).state == "complete"
    assert (await Answered(WordEncoder(last=b"")).plays("a REFUSE b")).state == "broken"


@pytest.mark.parametrize(
    ("script", "sequences", "status", "message"),
    [("REFUSE a WORK b .", 1, 424, "no such field"), ("1:? a.", 2, 424, "the engine failed")],
)
async def test_an_error_before_anything_was_sent_is_a_status(
    script: str, sequences: int, status: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    answered = await Answered(WordEncoder(stream=False), sequences=sequences).plays(script)
    assert (answered.client.status, answered.client.json, answered.state) == (
        status,
        {"error": message, "code": status},
        "complete",
    )
    assert (len(answered.client.sent), caplog.records) == (2, [])


async def test_an_error_that_is_a_status_has_its_headers() -> None:
    answered = Answered()
    answered.writer.deliver(chunk(error=OverloadedError("full", queue_depth=1, capacity=1, retry_after=7)))
    assert (answered.client.status, answered.client.headers["retry-after"]) == (503, "7")


@pytest.mark.parametrize(("script", "status"), [("a BREAK b", 200), ("BREAK b", 500)])
async def test_a_defect_is_for_the_log_and_not_for_the_client(
    caplog: pytest.LogCaptureFixture, script: str, status: int
) -> None:
    answered = await Answered().plays(script)
    assert (answered.client.status, answered.state) == (status, "complete" if status == 500 else "broken")
    assert answered.exchange.served.error == "KeyError" and b"secret" not in answered.client.body
    (record,) = caplog.records
    assert (record.levelno, request_id_of(record)) == (logging.ERROR, answered.exchange.request_id)
    assert "secret" in caplog.text


async def test_a_client_that_does_not_read_is_dropped_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    answered = await Answered().plays("a | b 29.9")
    before = answered.client.aborted
    await answered.plays("0.2")
    assert (before, answered.client.aborted) == (False, True)
    assert "30 seconds (option.stream_write_timeout)" in caplog.text


@pytest.mark.parametrize("script", ["a x d", "a | b c x d"])
async def test_a_write_that_fails_is_in_the_log(caplog: pytest.LogCaptureFixture, script: str) -> None:
    caplog.set_level(logging.INFO)
    await Answered().plays(script)
    assert "the client is gone: the client is gone" in caplog.text


async def test_a_wait_that_is_cancelled_leaves_nothing() -> None:
    answered = await Answered().plays("| a")
    answered.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answered.task
    await answered.plays("")
    await answered.plays(">")
    assert answered.client.sent == []


# -- coroutines that are begun by hand ---------------------------------------------------------------------------------


async def test_a_coroutine_that_never_waits_is_over_at_once_and_another_goes_on_with_values_and_errors() -> None:
    loop = asyncio.get_running_loop()
    seen: list[object] = []

    async def run(*waits: asyncio.Future[int]) -> int:
        seen.append("begun")
        for wait in waits:
            try:
                seen.append(await wait)
            except (ValueError, asyncio.CancelledError) as error:
                seen.append(type(error))
        return len(waits)

    assert start_now(run()) is None
    first, second, third = (loop.create_future() for _ in range(3))
    rest = start_now(run(first, second, third))
    assert rest is not None and seen == ["begun", "begun"]
    task = asyncio.ensure_future(rest)
    await asyncio.sleep(0)
    first.set_exception(ValueError("wrong"))
    await asyncio.sleep(0.01)
    second.set_result(7)
    await asyncio.sleep(0.01)
    task.cancel()
    assert await task == 3
    assert seen[2:] == [ValueError, 7, asyncio.CancelledError]
