"""A connection over a transport that notes what is done to it."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from starlette.types import ASGIApp

from djl_trtllm.config import Options
from djl_trtllm.server.app import Server
from djl_trtllm.server.http_protocol import HttpProtocol


class Wire(asyncio.Transport):
    """A transport that notes what is done to it."""

    def __init__(self, connection: socket.socket | None) -> None:
        super().__init__({"socket": connection})
        self.aborted = self.closed = False
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return False


def connected(
    wire: Wire, application: ASGIApp, data: bytes = b"GET /ping HTTP/1.1\r\nHost: test\r\n\r\n", **options: Any
) -> HttpProtocol:
    """A connection over a transport that has sent a request to an application."""
    server = Server(Options(**options), [], None)
    config = server.config
    config.load()
    config.loaded_app = application
    protocol = HttpProtocol(server._connections, config, server.server_state, {}, asyncio.get_running_loop())
    protocol.connection_made(wire)
    protocol.data_received(data)
    return protocol
