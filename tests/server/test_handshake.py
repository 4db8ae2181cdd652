"""Connections during their TLS handshake are bounded as all others."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, cast

import pytest

from djl_trtllm.config import Options
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.handshake import Handshake
from tests.support.certificates import Certificates

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> Iterator[asyncio.AbstractEventLoop]:
    """uvicorn takes uvloop where it is installed, which reads at another time than asyncio."""
    made: asyncio.AbstractEventLoop = pytest.importorskip(request.param).new_event_loop()
    yield made
    made.run_until_complete(made.shutdown_asyncgens())
    made.close()


class Echo(asyncio.Protocol):
    """Says what it gets."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class Listening:
    """Connections of a port with TLS."""

    def __init__(self, certificates: Certificates, **options: Any) -> None:
        self.connections = Connections(ServerContext(Options(**options)))
        self.trusting = ssl.create_default_context(cafile=certificates.authority)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificates.certificate, certificates.key)

    async def run(self, clients: Callable[[Listening], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Handshake(self.connections, self._context, Echo), "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        try:
            await asyncio.wait_for(clients(self), 60)
        finally:
            server.close()

    async def connect(self, context: ssl.SSLContext | None = None) -> Streams:
        return await asyncio.open_connection("127.0.0.1", self._port, ssl=context)

    async def until_idle(self, count: int) -> None:
        while len(self.connections.idle) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def test_handshakes_that_do_not_end_are_idle_connections_and_make_room(
    certificates: Certificates, loop: asyncio.AbstractEventLoop
) -> None:
    async def clients(listening: Listening) -> None:
        opened = []
        for number in range(5):
            opened.append(await listening.connect())
            await listening.until_idle(min(number + 1, 3))
        for reader, _ in opened[:2]:
            assert await reader.read() == b""
        reader, writer = await listening.connect(listening.trusting)
        writer.write(b"wolf")
        assert await reader.readexactly(4) == b"wolf"
        assert await opened[2][0].read() == b""
        for _, writer in opened[3:]:
            writer.close()
        await listening.until_idle(0)

    loop.run_until_complete(Listening(certificates, max_connections=3).run(clients))


def test_a_handshake_has_a_time(certificates: Certificates, loop: asyncio.AbstractEventLoop) -> None:
    async def clients(listening: Listening) -> None:
        reader, _ = await listening.connect()
        assert await reader.read() == b""
        assert not listening.connections.idle

    loop.run_until_complete(Listening(certificates, header_read_timeout=0.05).run(clients))


def test_what_is_no_handshake_ends_the_connection(certificates: Certificates, loop: asyncio.AbstractEventLoop) -> None:
    async def clients(listening: Listening) -> None:
        reader, writer = await listening.connect()
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert b"HTTP" not in await reader.read()
        await listening.until_idle(0)

    loop.run_until_complete(Listening(certificates).run(clients))


def test_its_deadline_is_that_of_an_idle_connection(
    certificates: Certificates, loop: asyncio.AbstractEventLoop
) -> None:
    async def clients(listening: Listening) -> None:
        reader, _ = await listening.connect()
        await listening.until_idle(1)
        (handshake,) = listening.connections.idle
        assert 50 < handshake.deadline - asyncio.get_running_loop().time() <= 75
        handshake.expire()
        assert not listening.connections.idle
        assert await reader.read() == b""

    loop.run_until_complete(Listening(certificates).run(clients))


def test_what_comes_together_with_the_end_of_a_handshake_is_not_lost(
    certificates: Certificates, loop: asyncio.AbstractEventLoop
) -> None:
    async def clients(listening: Listening) -> None:
        reader, writer = await listening.connect()
        received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = listening.trusting.wrap_bio(received, sent, server_hostname="127.0.0.1")
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(sent.read())
                received.write(await reader.read(65536))
        client.write(b"wolf")
        writer.write(sent.read())
        found = b""
        while not found:
            received.write(await reader.read(65536))
            try:
                found = client.read()
            except ssl.SSLWantReadError:
                continue  # session tickets
        assert found == b"wolf"

    loop.run_until_complete(Listening(certificates).run(clients))
