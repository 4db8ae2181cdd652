"""A client of one connection, on a transport that is no socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import Receive, Scope, Send

from djl_trtllm.config import Options
from djl_trtllm.server.app import Server
from djl_trtllm.server.http_protocol import HttpProtocol
from tests.server.wire import Wire

GET = b"GET /ping HTTP/1.1\r\nHost: test\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 6\r\n\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = {"max_header_size": 1024, "max_header_count": 10, "max_url_size": 128}


class Peer:
    """A connection to an application that answers with the body of a request, when `hold` is not set."""

    def __init__(self, **options: Any) -> None:
        self.server = Server(Options(**{**LIMITS, **options}), [], None)
        config = self.server.config
        config.load()
        config.loaded_app = self._answer
        self.connections = self.server._connections
        self.wire = Wire()
        self.hold: asyncio.Event | None = None
        self.seen: list[tuple[str, bytes | None]] = []
        self.protocol = HttpProtocol(self.connections, config, self.server.server_state, {}, asyncio.get_running_loop())
        self.protocol.connection_made(self.wire)
        self._watch = asyncio.ensure_future(self.connections.watch())

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
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        assert not self.connections.busy and not self.connections.idle
        assert self.connections.context.bodies.used == 0
