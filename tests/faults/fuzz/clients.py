"""Clients of the fuzzer: each sends a request its way, and returns the status and the end of the response."""

from __future__ import annotations

import asyncio
import contextlib
import re
from types import TracebackType
from typing import Any

import grpc
import httptools
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from djl_trtllm.api.triton.protocol import SERVICE
from tests.faults.fuzz.grammar import Made, Way

_UNREAD_BYTES = 65_536
_END = 300
"""Bytes of a response that are kept."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
NOTHING = "closed"
"""The status of requests that got no response, and need none."""


class _Connection(asyncio.Protocol):
    """An HTTP connection that is kept from request to request, as long as the server does."""

    def __init__(self) -> None:
        self.kept = False
        self.status = 0
        self.end = b""
        self.response: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> asyncio.Future[None]:
        assert self._transport is not None
        self.response = asyncio.get_running_loop().create_future()
        self.status, self.end, self.kept = 0, b"", False
        self._transport.write(request)
        return self.response

    def close(self) -> None:
        self.kept = False
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost(ValueError(f"no HTTP: {error!r}: {data[:_END]!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        self.kept = False
        self._lost(error or ConnectionResetError("closed without a response"))

    def _lost(self, error: Exception) -> None:
        if not self.response.done():
            self.response.set_exception(error)

    # -- of the parser -------------------------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.end = (self.end + body)[-_END:]

    def on_message_complete(self) -> None:
        if self.status < 200:
            return
        self.kept = bool(self._parser.should_keep_alive())
        if not self.response.done():
            self.response.set_result(None)


class Client:
    """Sends one request after the other."""

    def __init__(self, port: int, grpc_port: int) -> None:
        self._port = port
        self._grpc_address = f"127.0.0.1:{grpc_port}"
        self._channel: Any = None
        self._connection: _Connection | None = None

    async def __aenter__(self) -> Client:
        self._channel = grpc.aio.insecure_channel(self._grpc_address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.give_up()
        await self._channel.close()

    def give_up(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()

    async def send(self, made: Made) -> tuple[str, bytes]:
        """Status and end of the response. Raises OSError or ValueError if there is none."""
        match made.way:
            case Way.HTTP:
                return await self._http(made.data)
            case Way.RAW:
                return await self._raw(made.data)
            case Way.WEBSOCKET:
                return await self._websocket(made)
            case _:
                return await self._call(made)

    async def _http(self, data: bytes) -> tuple[str, bytes]:
        used = self._connection is not None and self._connection.kept
        try:
            return await self._exchange(data)
        except ConnectionError:
            # As clients do where a server closes a connection that it kept.
            if used:
                return await self._http(data)
            # A large body that nobody reads, because its headers are refused, may reset the connection.
            if len(data) > _UNREAD_BYTES:
                return NOTHING, b""
            raise

    async def _exchange(self, data: bytes) -> tuple[str, bytes]:
        connection = self._connection
        if connection is None or not connection.kept:
            self.give_up()
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Connection, "127.0.0.1", self._port)
            self._connection = connection
        await connection.send(data)
        return str(connection.status), connection.end

    async def _raw(self, data: bytes) -> tuple[str, bytes]:
        """A damaged head may have no response. It has no 500, and the server closes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            with contextlib.suppress(ConnectionError):
                writer.write(data)
                writer.write_eof()
                response = await reader.read()
                return max(_STATUS.findall(response), default=NOTHING.encode()).decode(), response[-_END:]
            return NOTHING, b""
        finally:
            writer.close()

    async def _websocket(self, made: Made) -> tuple[str, bytes]:
        address = f"ws://127.0.0.1:{self._port}{made.target}"
        try:
            async with connect(address, proxy=None, max_size=None, open_timeout=None, close_timeout=1) as socket:
                await socket.send(made.data)
                message = await socket.recv(decode=False)
        except WebSocketException as error:
            raise ValueError(repr(error)) from None
        end = message[-_END:]
        return "500" if b'"code":500' in end.replace(b" ", b"") else "websocket", end

    async def _call(self, made: Made) -> tuple[str, bytes]:
        method = f"/{SERVICE}/{made.target}"
        try:
            if made.way is Way.GRPC:
                end = await self._channel.unary_unary(method)(made.data)
                return "OK", end[-_END:]
            metadata = (("triton_grpc_error", "true"),)  # the first error is the status
            async for message in self._channel.stream_stream(method)(iter([made.data]), metadata=metadata):
                end = message[-_END:]
            return "OK", end
        except grpc.aio.AioRpcError as error:
            return error.code().name, (error.details() or "").encode()[-_END:]
