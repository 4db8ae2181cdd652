"""Requests and answers over HTTP and WebSockets: as bytes, and by clients that note when every part came."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.support.models import PROMPT

JSON = {"Content-Type": "application/json"}
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


def lmi(inputs: str, *, stream: bool = False, **parameters: Any) -> dict[str, Any]:
    """A request of the LMI schema."""
    return {"inputs": inputs, "parameters": parameters, "stream": stream}


def body(tokens: int = 4, *, stream: bool = False, **parameters: Any) -> bytes:
    """The body of a request for a number of tokens."""
    return json.dumps(lmi(PROMPT, stream=stream, max_new_tokens=tokens, **parameters)).encode()


def wordy(tokens: int) -> bytes:
    """A streaming request as bytes, with some 50 bytes for each token, however late its client reads them."""
    return raw_post(body(tokens, stream=True))


# -- on a socket -------------------------------------------------------------------------------------------------------


def raw_post(content: bytes, *headers: str, path: str = "/invocations", version: str = "1.1") -> bytes:
    """A POST request as bytes."""
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content


def read_all(connection: socket.socket) -> bytes:
    """Everything until the server closes."""
    received = bytearray()
    while data := connection.recv(65536):
        received += data
    return bytes(received)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    """Everything until `mark` has come."""
    received = bytearray()
    while mark not in received:
        data = connection.recv(65536)
        assert data, f"closed before {mark!r}: {bytes(received[-300:])!r}"
        received += data
    return bytes(received)


# -- a client ----------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """An answer, and when its parts came (seconds on the monotonic clock). Not `complete`: it broke off or was left."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    complete: bool = False
    asked: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0

    @property
    def json(self) -> Any:
        """The body of a whole answer."""
        return json.loads(self.body)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The objects of a jsonlines answer."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def token_ids(self) -> list[int]:
        """The tokens of an answer, whole (with details) or jsonlines."""
        if self.headers.get("content-type") == "application/json":
            return [token["id"] for token in self.json["details"]["tokens"]]
        return [line["token"]["id"] for line in self.lines]

    @property
    def time_to_first_token(self) -> float:
        """Seconds from the request to the first part of the body."""
        return self.arrivals[0] - self.asked


async def exchange(
    port: int,
    request: dict[str, Any],
    *,
    path: str = "/invocations",
    leave_after: int | None = None,
    reset: bool = False,
    on_part: Callable[[], None] | None = None,
) -> Answer:
    """Post a request and read the answer.

    `leave_after` disconnects when this number of parts of the body have come (0: as soon as the request is sent), with
    a reset instead of an orderly close if `reset`. `on_part` is called at every part.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    answer = Answer(asked=time.monotonic())
    writer.write(raw_post(json.dumps(request).encode(), "Connection: close", path=path))
    try:
        if leave_after == 0:
            await writer.drain()
            return answer
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionResetError):
            await _read(reader, answer, leave_after, on_part)
        answer.ended = time.monotonic()
        return answer
    finally:
        if reset:
            writer.transport.abort()
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _read(
    reader: asyncio.StreamReader, answer: Answer, leave_after: int | None, on_part: Callable[[], None] | None
) -> None:
    status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
    answer.status = int(status.split()[1])
    answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
    if (length := answer.headers.get("content-length")) is not None:
        answer.body = await reader.readexactly(int(length))
        answer.arrivals.append(time.monotonic())
        answer.complete = True
        return
    while size := int(await reader.readuntil(b"\n"), 16):
        part = await reader.readexactly(size + 2)
        answer.body += part[:-2]
        answer.arrivals.append(time.monotonic())
        if on_part is not None:
            on_part()
        if len(answer.arrivals) == leave_after:
            return
    await reader.readline()
    answer.complete = True


HANDSHAKE = (
    b"GET /invocations-bidirectional-stream HTTP/1.1\r\nHost: localhost\r\n"
    b"Connection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)
"""A handshake without the empty line at its end."""
PATH = "/invocations-bidirectional-stream"
CONTINUATION, TEXT, BINARY, PING_FRAME = 0, 1, 2, 9


def frame(kind: int, data: bytes = b"", *, end: bool = True) -> bytes:
    """A client's frame, with a mask that changes nothing."""
    size = bytes([0x80 | len(data)]) if len(data) < 126 else b"\xfe" + struct.pack("!H", len(data))
    return bytes([0x80 * end | kind]) + size + bytes(4) + data


def opened(port: int, path: str = PATH, *, scheme: str = "ws", **options: Any) -> ClientConnection:
    """A socket of the library, which waits for the server without limits of its own: a machine may be busy."""
    limits = {"proxy": None, "max_size": None, "open_timeout": None, "ping_interval": None}
    return connect(f"{scheme}://127.0.0.1:{port}{path}", **limits, **options)
