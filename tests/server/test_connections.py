"""All connections of a server: their number, who makes room, and their deadlines."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
import struct
import tracemalloc
from functools import partial
from itertools import pairwise
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from djl_trtllm.config import Options
from djl_trtllm.server.connections import Connections, HttpRefusal, reset
from djl_trtllm.server.context import ServerContext
from tests.server.application import CHUNKED, GET, POST, Peer
from tests.support.tables import by_table
from tests.support.virtual_time import VirtualLoop, at_end, in_real_time, until


class Played:
    """A connection that notes what is done to it."""

    def __init__(self, connections: Connections, deadline: float = 1e9) -> None:
        self.connections = connections
        self.deadline = deadline
        self.dropped = self.expired = self.unread = False
        connections.enter(self)

    def has_unread(self) -> bool:
        return self.unread

    def expire(self) -> None:
        self.expired = True
        self.drop()

    def drop(self) -> None:
        self.dropped = True
        self.connections.leave(self)


def connections(most: int = 3) -> Connections:
    return Connections(ServerContext(Options(max_connections=most)))


def busy(all_of_them: Connections) -> Played:
    """A connection with a request."""
    connection = Played(all_of_them)
    if connection in all_of_them.idle:
        all_of_them.start(connection)
    return connection


def test_within_the_limit_nobody_is_dropped() -> None:
    shared = connections(3)
    idle = [Played(shared) for _ in range(3)]
    assert not any(connection.dropped for connection in idle)
    assert list(shared.idle) == idle


def test_a_new_connection_takes_the_place_of_the_one_that_is_idle_longest() -> None:
    shared = connections(3)
    first, second, third = Played(shared), busy(shared), Played(shared)
    shared.start(first)
    shared.rest(first)
    fourth = Played(shared)
    assert [each.dropped for each in (first, second, third, fourth)] == [False, False, True, False]
    shared.admit(fourth, b"/invocations")


def test_a_connection_whose_request_was_not_read_yet_makes_no_room() -> None:
    shared = connections(3)
    first, second, third = Played(shared), Played(shared), Played(shared)
    first.unread = third.unread = True
    fourth = Played(shared)
    assert [each.dropped for each in (first, second, third, fourth)] == [False, True, False, False]
    fourth.unread = True
    fifth = Played(shared)
    assert not fifth.dropped and not shared.idle
    with pytest.raises(HttpRefusal):
        shared.admit(fifth, b"/invocations")


def test_beyond_the_limit_only_health_checks_are_admitted_until_there_is_room() -> None:
    shared = connections(2)
    first, _ = busy(shared), busy(shared)
    third = Played(shared)
    assert third not in shared.idle
    for path in (b"/ping", b"/health", b"/v2/health/live", b"/v2/health/ready"):
        shared.admit(third, path)
    with pytest.raises(HttpRefusal, match="max_connections=2 connections are open") as caught:
        shared.admit(third, b"/invocations")
    assert caught.value.status == 503
    shared.leave(first)
    shared.admit(third, b"/invocations")
    shared.rest(third)
    assert third in shared.idle


def test_of_the_connections_for_health_checks_the_oldest_makes_room() -> None:
    shared = connections(1)
    busy(shared)
    spare = [Played(shared) for _ in range(66)]
    assert [each.dropped for each in spare] == [True, True, *[False] * 64]
    assert (len(shared.busy), len(shared.idle)) == (65, 0)


def watched() -> Connections:
    """Connections whose deadlines are enforced until the end of the test."""
    shared = connections()
    watching = asyncio.ensure_future(shared.watch())

    async def end() -> None:
        assert not watching.done()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    at_end(end)
    return shared


@pytest.mark.parametrize("asked", [False, True])
async def test_deadlines_are_enforced(asked: bool) -> None:
    shared = watched()
    late, soon, never = Played(shared, 0.5), Played(shared, 1.2), Played(shared, float("inf"))
    if asked:
        for connection in (late, soon, never):
            shared.start(connection)
    await asyncio.sleep(0.6)
    assert [late.expired, soon.expired, never.expired] == [True, False, False]
    await asyncio.sleep(1)
    assert [soon.expired, never.expired] == [True, False]


@pytest.mark.parametrize("error", [MemoryError, ValueError])
async def test_deadlines_are_enforced_also_where_memory_was_short_or_something_is_wrong(
    error: type[Exception],
) -> None:
    class Failing(Played):
        def expire(self) -> None:
            if not self.expired:
                self.expired = True
                raise error
            self.drop()

    shared = watched()
    busy_one, idle_one = Failing(shared, 1.0), Failing(shared, 1.0)
    shared.start(busy_one)
    await asyncio.sleep(3)
    assert busy_one.dropped and idle_one.dropped


@in_real_time
async def test_a_reset_sends_nothing_more_and_does_not_wait() -> None:
    began: asyncio.Future[asyncio.BaseTransport] = asyncio.get_running_loop().create_future()

    class Kept(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            began.set_result(transport)

    server = await asyncio.get_running_loop().create_server(Kept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    transport = await began
    assert isinstance(transport, asyncio.Transport)
    reset(transport)
    with pytest.raises(ConnectionResetError):
        await reader.read()
    assert transport.get_write_buffer_size() == 0
    writer.close()
    server.close()


async def test_of_many_requests_sixteen_begin_in_a_turn_of_the_event_loop_in_their_order() -> None:
    shared, begun, seen = connections(), list[int](), list[int]()
    failures = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    def begin(number: int) -> None:
        begun.append(number)
        if number == 50:
            raise RuntimeError(number)

    for number in range(80):
        shared.begin(partial(begin, number))
    while len(begun) < 80:
        seen.append(len(begun))
        await asyncio.sleep(0)
    assert begun == list(range(80)) and seen[0] == 16 and len(seen) > 1
    assert max(later - now for now, later in pairwise([*seen, 80])) <= 16
    assert len(failures) == 1, "a request that fails stops no other"
    await asyncio.sleep(0)
    shared.begin(partial(begin, 80))
    assert begun[-1] == 80, "alone it begins at once"


async def test_refusals_are_counted_and_one_of_each_kind_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    shared = connections()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            shared.note(HttpRefusal(431, "too many headers"))
        shared.note(HttpRefusal(408, "too slow"))
        assert len(caplog.messages) == 2
        await asyncio.sleep(61)
        shared.note(HttpRefusal(431, "too many headers"))
    assert shared.context.counts.responses == {(431, "unknown", ""): 4, (408, "unknown", ""): 1}
    assert [message[:43] for message in caplog.messages] == [
        "a request is refused with 431: too many hea",
        "a request is refused with 408: too slow (no",
        "a request is refused with 431: too many hea",
    ]


@pytest.mark.parametrize("status", [431, 503])
def test_a_refusal_says_why_and_closes_the_connection(status: int) -> None:
    head, _, content = HttpRefusal(status, "too much").reply([(b"date", b"today")]).partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    assert line.startswith(b"HTTP/1.1 %d " % status)
    assert headers[0] == b"date: today"
    assert {b"content-type: application/json", b"connection: close"} <= set(headers)
    assert b"content-length: %d" % len(content) in headers
    assert (b"retry-after: 1" in headers) == (status == 503)
    assert json.loads(content)["code"] == status
    assert json.loads(content)["message"] == "too much"


@by_table("soft", "hard", "most", "raised", "left")
def test_the_limit_of_descriptors_is_raised_or_that_of_connections_lowered(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    soft: int,
    hard: int,
    most: int,
    raised: int | None,
    left: int,
) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: given.append(limits))
    shared = connections(most)
    shared.reserve_descriptors()
    assert given == ([] if raised is None else [(raised, hard)])
    assert shared.most == left
    assert [f"max_connections={most} is lowered to {left}" in text for text in caplog.messages] == [True] * (
        left < most
    )


# -- what has come in time is answered, also where the server did not run meanwhile ------------------------------------

PING = GET + b"\r\n"
HALF = len(POST) // 2


@pytest.mark.parametrize(
    ("before", "rest", "limit"),
    [
        (b"", PING, "keep_alive_timeout"),
        (PING, PING, "keep_alive_timeout"),
        (POST[:HALF], POST[HALF:] + b"a wolf", "header_read_timeout"),
        (POST + b"a", b" wolf", "body_read_timeout"),
    ],
)
@pytest.mark.parametrize(("seconds", "stopped"), [(10.0, 100.0), (0.5, 0.0)])
async def test_bytes_that_came_in_time_are_read_before_a_deadline_ends_their_connection(
    before: bytes, rest: bytes, limit: str, seconds: float, stopped: float
) -> None:
    limits: dict[str, Any] = {limit: seconds}
    server = Peer(**limits)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    ours, theirs = socket.socketpair()

    def stop() -> None:
        """In the turn of the loop in which deadlines are looked at next."""
        theirs.sendall(rest)
        loop.now += stopped

    with theirs:
        theirs.setblocking(False)
        theirs.sendall(before)
        await server.accept(ours)
        loop.call_at(0.5, stop)
        await asyncio.sleep(2)
        answers = theirs.recv(4096)
    assert answers.count(b"HTTP/1.1 200") == 1 + (before == PING)
    await asyncio.sleep(0.1)


async def test_a_client_that_is_late_is_so_although_the_server_stood_still_before() -> None:
    peer = Peer(keep_alive_timeout=5.0)
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    loop.call_at(0.5, lambda: setattr(loop, "now", loop.now + 100.0))
    await asyncio.sleep(104)
    assert not peer.wire.done
    await asyncio.sleep(2)
    assert "close" in peer.wire.done


async def test_a_client_that_is_read_first_when_the_server_goes_on_has_no_more_time_than_others() -> None:
    peer = Peer(header_read_timeout=5.0)
    loop = cast(VirtualLoop, asyncio.get_running_loop())

    def go_on() -> None:
        loop.now += 100.0
        peer.sends(PING[:HALF])

    loop.call_at(0.4, go_on)
    await asyncio.sleep(104)
    assert not peer.statuses
    await asyncio.sleep(3)
    assert peer.statuses == [408]


@by_table("data", "seconds", "message")
async def test_slow_requests_are_refused_when_their_time_is_over(data: bytes, seconds: float, message: str) -> None:
    peer = Peer()
    peer.sends(data)
    await asyncio.sleep(seconds - 1)
    assert not peer.statuses
    await asyncio.sleep(2)
    assert peer.statuses == [408]
    assert peer.refusal == message
    assert peer.seen == ([] if data == GET else [("/echo", None)])
    peer.sends(b"x" * (1 << 20))
    assert "abort" not in peer.wire.done
    peer.sends(b"x")
    assert "abort" in peer.wire.done


async def test_a_large_body_has_more_time() -> None:
    peer = Peer()
    size = 16384 * 100
    await asyncio.sleep(0.001)  # deadlines are looked at every half second
    peer.sends(POST.replace(b"6", b"%d" % (size + 1)), b"x" * size)
    await asyncio.sleep(160.4)
    assert not peer.statuses
    await asyncio.sleep(0.2)
    assert peer.statuses == [408]


async def test_a_connection_whose_client_has_left_already_is_dropped() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        there = Peer(connection=connection)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with connection:
            gone = Peer(connection=connection)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        unix = Peer(connection=ours)  # it has no addresses
    assert [("abort" in peer.wire.done) for peer in (there, gone, unix)] == [False, True, False]


async def test_a_connection_has_something_to_read_when_bytes_are_there_or_its_client_has_left() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer, found = Peer(connection=ours), list[bool]()
        for act in (lambda: None, lambda: theirs.sendall(b"a"), lambda: ours.recv(1), theirs.close, ours.close):
            act()
            found.append(peer.protocol.has_unread())
    assert found == [False, True, False, True, False] and not Peer().protocol.has_unread()


@pytest.mark.parametrize("data", [b"", GET + b"\r\n", POST + b"a wolf"])
async def test_an_idle_connection_is_closed_after_its_time(data: bytes) -> None:
    peer = Peer()
    peer.sends(data)
    await asyncio.sleep(70)
    assert "close" not in peer.wire.done
    assert list(peer.connections.idle) == [peer.protocol]
    await asyncio.sleep(10)
    assert "close" in peer.wire.done


async def test_the_time_for_deadlines_passes_evenly_after_the_server_stood_still() -> None:
    shared = watched()
    loop = cast(VirtualLoop, asyncio.get_running_loop())
    loop.call_at(0.5, lambda: setattr(loop, "now", loop.now + 100.0))
    await asyncio.sleep(102.1)
    before = shared.now()
    await asyncio.sleep(0.2)
    assert shared.now() - before == pytest.approx(0.2)


async def test_a_request_that_has_begun_behind_one_whose_body_was_announced_is_answered() -> None:
    peer = Peer()
    announced = POST.removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\na wolf"
    peer.sends(CHUNKED + b"0\r\n\r\n" + announced + GET)  # in one piece, as the first has no length
    await until(lambda: len(peer.seen) == 2)
    await asyncio.sleep(1)
    peer.sends(b"\r\n")
    await until(lambda: len(peer.seen) == 3)
    assert peer.statuses == [200, 100, 200, 200]
    await peer.leave()


@pytest.mark.parametrize("path", [b"/else", b"/echo"])
async def test_a_body_that_was_announced_and_not_asked_for_ends_the_connection(path: bytes) -> None:
    peer = Peer()
    head = POST.replace(b"/echo", path).removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\n"
    peer.sends(head)
    await until(lambda: bool(peer.statuses))
    assert peer.statuses == [200 if path == b"/else" else 100]
    assert ("eof" in peer.wire.done) == (path == b"/else")
    if path == b"/echo":
        peer.sends(b"a wolf")
        await until(lambda: len(peer.statuses) == 2)
        assert peer.seen == [("/echo", b"a wolf")]
        assert "close" not in peer.wire.done


async def test_a_body_that_was_refused_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    peer = Peer()
    peer.sends(CHUNKED.removesuffix(b"\r\n") + b"Expect: 100-continue\r\n\r\n" + b"-1\r\n")
    await asyncio.sleep(1)
    assert peer.statuses == [400]
    assert not [record for record in caplog.records if record.exc_info]


async def test_the_rest_of_a_large_body_is_read_when_the_application_has_taken_what_came() -> None:
    peer = Peer()
    peer.sends(POST.replace(b": 6", b": 200000"), b"x" * 100_000)
    assert "pause" in peer.wire.done
    await until(lambda: "pause" not in peer.wire.done)
    peer.sends(b"x" * 100_000)
    await until(lambda: peer.statuses == [200])


async def test_a_long_header_of_a_response_is_not_kept_for_other_responses() -> None:
    values = (b"%d" % number * 20_000 for number in range(100, 200))

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"x-story", next(values)), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    peer = Peer(application)
    tracemalloc.start()
    try:
        for number in range(100, 200):
            peer.sends(GET + b"\r\n")
            await asyncio.sleep(0.01)
            assert peer.wire.written.count(b"%d" % number) >= 20_000
            peer.wire.written = b""
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20, "a hundred of them, and their lines, have 12 MB"
