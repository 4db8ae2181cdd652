"""Connections that the server drops."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

import pytest
from starlette.types import Receive, Scope, Send

from djl_trtllm.config import Options
from djl_trtllm.server.app import Server
from djl_trtllm.server.exchange import CONNECTION
from djl_trtllm.server.http_protocol import HttpProtocol
from djl_trtllm.server.light_event import LightEvent
from tests.server.connected import Wire, connected
from tests.support.client import raw_post


async def abort_of(wire: Wire) -> Callable[[], None]:
    """What a request over a transport has as the server's extension."""
    scopes: list[Scope] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    protocol = connected(wire, application)
    await asyncio.sleep(0)
    assert scopes[0]["path"] == "/ping"
    call: Callable[[], None] = scopes[0][CONNECTION].reset
    protocol.connection_lost(None)
    await asyncio.sleep(0)
    return call


def test_a_connection_whose_client_has_left_already_is_dropped() -> None:
    async def aborted(connection: socket.socket) -> bool:
        wire = Wire(connection)
        connected(wire, idle).connection_lost(None)
        return wire.aborted

    async def idle(scope: Scope, receive: Receive, send: Send) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        connection, _ = listener.accept()
        assert not asyncio.run(aborted(connection))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        with connection:
            assert asyncio.run(aborted(connection))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert not asyncio.run(aborted(ours))  # a Unix socket has no addresses


def test_a_connection_is_small() -> None:
    async def body() -> None:
        server = Server(Options(), [], None)
        server.config.load()
        loop = asyncio.get_running_loop()
        protocol = HttpProtocol(server._connections, server.config, server.server_state, {}, loop)
        protocol.connection_made(Wire(None))
        protocol.data_received(b"GET /ping HTTP/1.1\r\nHost: test\r\n\r\n")
        # Python keeps the keys of up to 30 attributes once for all objects of a class.
        assert len(vars(protocol)) <= 30
        assert type(protocol.cycle.message_event).__name__ == LightEvent.__name__
        events = [value for value in vars(protocol.flow).values() if hasattr(value, "is_set")]
        assert [(type(event), event.is_set()) for event in events] == [(LightEvent, True)]
        protocol.connection_lost(None)

    asyncio.run(body())


def lingers(connection: socket.socket) -> tuple[int, int]:
    on, seconds = struct.unpack("ii", connection.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, 8))
    return on, seconds


def test_a_connection_is_dropped_together_with_what_was_not_read() -> None:
    async def body() -> None:
        with socket.socket() as connection:
            wire = Wire(connection)
            abort = await abort_of(wire)
            assert lingers(connection)[0] == 0
            abort()
            assert lingers(connection) == (1, 0)
        assert wire.aborted

    asyncio.run(body())


@pytest.mark.parametrize("closed", [True, False])
def test_a_connection_that_is_closed_or_has_no_socket_is_dropped_too(closed: bool) -> None:
    async def body() -> None:
        connection = socket.socket() if closed else None
        wire = Wire(connection)
        abort = await abort_of(wire)
        if connection is not None:
            connection.close()
        abort()
        assert wire.aborted

    asyncio.run(body())


def test_a_part_of_a_body_is_sent_while_the_client_reads_and_is_there() -> None:
    async def body() -> None:
        wire = Wire(None)
        begun = asyncio.Event()
        writes: list[Callable[[bytes], bool]] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            writes.append(scope[CONNECTION].write_part)
            await begun.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await asyncio.Event().wait()

        protocol = connected(wire, application)
        await asyncio.sleep(0)
        (write,) = writes
        assert not write(b"before the head")
        begun.set()
        await asyncio.sleep(0.001)
        head = wire.written
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert write(b"a wolf, twenty bytes")
        protocol.pause_writing()
        assert not write(b"too fast")
        protocol.resume_writing()
        assert write(b"!")
        assert wire.written.removeprefix(head) == b"14\r\na wolf, twenty bytes\r\n1\r\n!\r\n"
        protocol.connection_lost(None)
        assert not write(b"gone")

    asyncio.run(body())


def test_an_application_that_fails_is_answered_and_has_no_task_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        wire = Wire(None)

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            raise ZeroDivisionError

        protocol = connected(wire, application)
        await asyncio.sleep(0.001)
        assert wire.written.startswith(b"HTTP/1.1 500") and not protocol.tasks
        assert "ZeroDivisionError" in caplog.text

    asyncio.run(body())


def test_there_is_a_parser_while_a_request_is_read_only() -> None:
    async def body() -> None:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        wire = Wire(None)
        protocol = connected(wire, application)
        parsers: list[object] = []
        for _ in range(2):
            parsers.append(protocol.parser)
            await asyncio.sleep(0.001)
            protocol.data_received(b"GET /ping HTTP/1.1\r\nHo")
            assert protocol.parser is not None
            protocol.data_received(b"st: test\r\n\r\n")
        await asyncio.sleep(0.001)
        assert wire.written.count(b"200 OK") == 3
        assert parsers == [None, None]

    asyncio.run(body())


def test_a_body_with_a_length_has_no_parts() -> None:
    async def body() -> None:
        wire = Wire(None)
        sent: list[bool] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            sent.append(scope[CONNECTION].write_part(b"part"))

        protocol = connected(wire, application)
        await asyncio.sleep(0.001)
        protocol.connection_lost(None)
        assert sent == [False]
        assert b"part" not in wire.written

    asyncio.run(body())


def pipelined(data: list[bytes]) -> int:
    """How many requests are begun before the first, which is never answered."""

    async def body() -> int:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.Event().wait()

        server = Server(Options(), [], None)
        config = server.config
        config.load()
        config.loaded_app = application
        protocol = HttpProtocol(server._connections, config, server.server_state, {}, asyncio.get_running_loop())
        protocol.connection_made(Wire(None))
        for part in data:
            protocol.data_received(part)
        assert protocol.cycle is not None
        begun = len(protocol.pipeline)
        protocol.connection_lost(None)
        return begun

    return asyncio.run(body())


def test_after_the_shortest_head_the_next_request_is_not_begun_before_the_answer() -> None:
    assert pipelined([b"GET / HTTP/1.1\r\n\r\n" * 2]) == 0


@pytest.mark.parametrize("split", [False, True])
def test_wherever_a_head_ends_the_next_request_is_not_begun_before_the_answer(split: bool) -> None:
    for padding in range(890, 1000):
        request = raw_post(b"{}", "X: " + "y" * padding)
        end = request.index(b"\r\n\r\n")
        both = request + raw_post(b"{}", "X: " + "y" * 3000)
        data = [[both[:cut], both[cut:]] for cut in range(end, end + 5)] if split else [[both]]
        assert [pipelined(each) for each in data] == [0] * len(data), padding


@pytest.mark.parametrize(("path", "status"), [(b"/ping?verbose", b"200"), (b"/models", b"503")])
def test_one_connection_too_many_is_for_health_checks(path: bytes, status: bytes) -> None:
    async def body() -> None:
        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/long":
                await asyncio.Event().wait()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        wires = [Wire(None), Wire(None)]
        first = connected(wires[0], application, b"GET /long HTTP/1.1\r\n\r\n", max_connections=1)
        second = HttpProtocol(first._connections, first.config, first.server_state, {}, first.loop)
        second.connection_made(wires[1])
        second.data_received(b"GET " + path + b" HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.001)
        assert wires[1].written.startswith(b"HTTP/1.1 " + status)
        first.connection_lost(None)
        second.connection_lost(None)

    asyncio.run(body())


def test_what_follows_the_last_request_of_a_connection_is_ignored() -> None:
    async def body() -> None:
        paths: list[str] = []

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            paths.append(scope["path"])
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})

        wire = Wire(None)
        last = b"POST /last HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        connected(wire, application, last + b"GET /next HTTP/1.1\r\n\r\n")
        await asyncio.sleep(0.001)
        assert (paths, wire.written.count(b"HTTP/1.1 "), wire.closed, wire.aborted) == (["/last"], 1, True, False)

    asyncio.run(body())
