"""What a client of a WebSocket sends, as bytes; and the client of the websockets library."""

from __future__ import annotations

import struct
from typing import Any

from websockets.sync.client import ClientConnection, connect

HANDSHAKE = (
    b"GET /invocations-bidirectional-stream HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
"""A handshake without the empty line at its end."""
PATH = "/invocations-bidirectional-stream"
CONTINUATION, TEXT, BINARY, PING = 0, 1, 2, 9


def frame(kind: int, data: bytes = b"", *, end: bool = True) -> bytes:
    """A client's frame, with a mask that changes nothing."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes([0x80 * end | kind]) + size + bytes(4) + data


def opened(port: int, path: str = PATH, *, scheme: str = "ws", **options: Any) -> ClientConnection:
    """A socket of the library, which waits for the server without limits of its own: a machine may be busy."""
    limits = {"proxy": None, "max_size": None, "open_timeout": None, "ping_interval": None}
    return connect(f"{scheme}://127.0.0.1:{port}{path}", **limits, **options)
