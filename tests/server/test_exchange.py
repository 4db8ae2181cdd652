"""One HTTP request and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.api import Reply
from djl_trtllm.config import Options
from djl_trtllm.errors import NotReadyError, OverloadedError, RequestTooLargeError
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.server.exchange import CONNECTION, ClientGone, Exchange
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.telemetry import Telemetry
from tests.support.asgi import Connection
from tests.support.virtual_time import in_virtual_time

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
        self.counts = ServerCounts()
        self.exchange = Exchange(
            self.client.scope,
            self.client.receive,
            self.client.send,
            OPTIONS,
            self.counts,
            bodies=memory or BodyMemory(),
        )


# -- the request -------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_headers_and_custom_attributes_are_properties() -> None:
    exchange = Pair(headers={"X-Color": "red", "X-Amzn-SageMaker-Custom-Attributes": "size=7"}).exchange
    assert (exchange.properties["x-color"], exchange.properties["size"]) == ("red", "7")


@in_virtual_time
async def test_the_request_id_is_that_of_the_configured_header_or_new() -> None:
    assert Pair(headers={"x-trace": "story-1"}).exchange.request_id == "story-1"
    ids = {Pair(headers={"x-request-id": "other"}).exchange.request_id for _ in range(2)}
    assert [len(each) for each in ids] == [36, 36]


@in_virtual_time
async def test_of_parameters_given_twice_the_first_counts() -> None:
    exchange = Pair(query="name=a%20wolf&name=fox&empty=").exchange
    assert exchange.query == {"name": "a wolf", "empty": ""}


@pytest.mark.parametrize(
    ("query", "headers", "name"),
    [
        ("model_name=fox", {"model_name": "wolf"}, "fox"),
        ("", {"model_name": "wolf"}, "wolf"),
        ("model_name=", {}, None),
        ("", {"model_name": ""}, None),
    ],
)
@in_virtual_time
async def test_query_or_header_name_the_model(query: str, headers: dict[str, str], name: str | None) -> None:
    assert Pair(headers=headers, query=query).exchange.model_name == name


# -- its body ----------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_body_may_come_in_parts() -> None:
    pair = Pair(None)
    pair.client.upload(b"a wo", more=True)
    pair.client.upload(b"", more=True)
    pair.client.upload(b"lf")
    assert await pair.exchange.body() == b"a wolf"


@in_virtual_time
async def test_a_body_takes_memory_until_it_is_released() -> None:
    memory = BodyMemory(12)
    pair = Pair(None, memory=memory)
    pair.client.upload(b"a wo", more=True)
    pair.client.upload(b"lf")
    await pair.exchange.body()
    assert memory.used == 6
    pair.exchange.release()
    pair.exchange.release()
    assert memory.used == 0


@in_virtual_time
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


@in_virtual_time
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
@in_virtual_time
async def test_a_body_has_at_most_max_request_size_bytes(size: int, fits: bool, declared: bool) -> None:
    content = b"x" * size
    pair = Pair(content, {"content-length": str(size)} if declared else {})
    with nullcontext() if fits else pytest.raises(RequestTooLargeError, match="larger than max_request_size="):
        assert await pair.exchange.body() == content


@in_virtual_time
async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    pair = Pair(None, {"content-length": "11"})
    with pytest.raises(RequestTooLargeError, match="larger than max_request_size="):
        await pair.exchange.body()


@pytest.mark.parametrize("length", ["eleven", "¹¹"])
@in_virtual_time
async def test_a_length_that_is_no_number_is_no_length(length: str) -> None:
    assert await Pair(b"a wolf", {"content-length": length}).exchange.body() == b"a wolf"


@in_virtual_time
async def test_what_is_too_large_is_read_no_further() -> None:
    pair = Pair(None)
    pair.client.upload(b"x" * 11, more=True)
    with pytest.raises(RequestTooLargeError, match="larger than max_request_size="):
        await pair.exchange.body()


@in_virtual_time
async def test_a_client_may_go_in_the_middle_of_its_body() -> None:
    pair = Pair(None)
    pair.client.upload(b"a wo", more=True)
    pair.client.leave()
    with pytest.raises(ClientGone):
        await pair.exchange.body()


# -- the answer --------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_reply_is_whole() -> None:
    pair = Pair(headers={"x-trace": "story-1"})
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
    assert pair.counts.responses == {(201, "unknown", ""): 1}


@in_virtual_time
async def test_an_answer_without_a_length_is_chunked() -> None:
    pair = Pair()
    await pair.exchange.begin(200, "application/jsonlines", None)
    assert "content-length" not in pair.client.headers
    assert not pair.client.complete


@in_virtual_time
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


@in_virtual_time
async def test_a_connection_is_dropped_where_the_server_can_do_so() -> None:
    pair = Pair()
    pair.exchange.abort()
    assert pair.client.aborted
    bare = Pair()
    del bare.client.scope[CONNECTION]
    bare.exchange.abort()
    assert not bare.client.aborted


@in_virtual_time
async def test_a_response_is_counted_with_its_route_and_its_model() -> None:
    pair = Pair()
    pair.exchange.route, pair.exchange.model = "/v1/completions", "story"
    await pair.exchange.reply(Reply(201, "text/plain", b""))
    assert pair.counts.responses == {(201, "/v1/completions", "story"): 1}


@in_virtual_time
async def test_a_response_that_goes_on_without_its_handler_keeps_no_headers() -> None:
    pair = Pair(headers={"x-trace": "r-1"})
    rest = asyncio.get_running_loop().create_future()
    assert pair.exchange.properties
    pair.exchange.go_on(rest)
    assert (pair.exchange.rest, pair.exchange.properties, pair.exchange.served.headers) == (rest, {}, {})


@in_virtual_time
async def test_a_trace_has_the_headers_of_a_request_that_goes_on_without_its_handler() -> None:
    pair = Pair(headers={"traceparent": "00"})
    pair.exchange.telemetry = Telemetry(traces=cast(Any, object()))
    headers = pair.exchange.properties
    pair.exchange.go_on(asyncio.get_running_loop().create_future())
    assert (pair.exchange.properties, pair.exchange.served.headers) == ({}, headers)


@pytest.mark.parametrize("begun", [False, True])
@in_virtual_time
async def test_at_the_end_what_is_done_for_a_request_ends_and_it_is_reported(begun: bool) -> None:
    ended: list[object] = []
    pair = Pair(b"12345678")
    exchange = pair.exchange
    exchange.telemetry = cast(Any, SimpleNamespace(ended=ended.append))
    await exchange.body()
    if begun:
        exchange.caller = cast(Any, SimpleNamespace(leave=lambda: ended.append("left")))
        exchange.service = cast(Any, SimpleNamespace(cancel=ended.append))
    assert exchange.bodies.used == 8
    exchange.end()
    assert ended == [*([exchange.served.generations, "left"] if begun else []), exchange.served]
    assert exchange.bodies.used == 0


def test_the_address_of_a_client_is_that_of_its_socket_if_it_has_one() -> None:
    pair = Pair()
    assert pair.exchange.address is None
    pair.client.scope["client"] = ("10.0.0.1", 5000)
    assert pair.exchange.address == "10.0.0.1"
