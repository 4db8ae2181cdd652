"""A client of one connection, on a transport that notes what is done to it."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from djl_trtllm.config import Options
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.http_protocol import HttpProtocol

GET = b"GET /ping HTTP/1.1\r\nHost: test\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 6\r\n\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = {"max_header_size": 1024, "max_header_count": 10, "max_url_size": 128}


class Wire(asyncio.Transport):
    """A transport that keeps what is written; `done` are the calls that were made."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        super().__init__({"socket": connection})
        self.written = b""
        self.done: set[str] = set()
        self.unsent = 0

    def write(self, data: Any) -> None:
        if "eof" in self.done:
            raise RuntimeError("Cannot call write() after write_eof()")  # as real ones do
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.done.add("eof")

    def is_closing(self) -> bool:
        return bool(self.done & {"close", "abort"})

    def close(self) -> None:
        self.done.add("close")

    def abort(self) -> None:
        self.done.add("abort")

    def pause_reading(self) -> None:
        self.done.add("pause")

    def resume_reading(self) -> None:
        self.done.discard("pause")

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol


class Peer:
    """A connection to `application`; without one, every request is answered with "ok" as soon as `hold` is set.

    `beside` is a peer of the same server.
    """

    def __init__(
        self,
        application: ASGIApp | None = None,
        connection: socket.socket | None = None,
        beside: Peer | None = None,
        **options: Any,
    ) -> None:
        context = ServerContext.open(Options(**{**LIMITS, **options}))
        self.connections: Connections = beside.connections if beside else Connections(context)
        self.state = ServerState()
        self.wire = Wire(connection)
        self.hold: asyncio.Event | None = None
        self.seen: list[tuple[str, bytes | None]] = []
        config = Config(
            application or self._answer,
            interface="asgi3",
            log_config=None,
            ws_max_size=context.options.max_request_size,
            ws_per_message_deflate=False,
        )
        config.load()
        self.protocol = HttpProtocol(self.connections, config, self.state)
        self.protocol.connection_made(self.wire)
        self.watch = asyncio.ensure_future(self.connections.watch())

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", scope["path"] == "/echo"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                self.seen.append((scope["path"], None))
                return
            body += message["body"]
            more = message["more_body"]
        self.seen.append((scope["path"], body))
        if self.hold is not None:
            await self.hold.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    def sends(self, *data: bytes) -> None:
        for each in data:
            self.protocol.data_received(each)

    @property
    def statuses(self) -> list[int]:
        return [int(part[:3]) for part in self.wire.written.split(b"HTTP/1.1 ")[1:]]

    @property
    def refusal(self) -> str:
        return str(json.loads(self.wire.written.rpartition(b"\r\n\r\n")[2])["message"])

    async def leave(self) -> None:
        self.protocol.connection_lost(None)
        self.watch.cancel()
        await asyncio.gather(self.watch, return_exceptions=True)
        assert not self.connections.busy and not self.connections.idle
        assert self.connections.context.bodies.used == 0
