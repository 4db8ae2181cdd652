"""A streaming load generator that costs little: one thread, epoll, no HTTP library.

Client, server and engine share the cores of the machine that measures, so a client that parses what it reads would
measure itself. This one counts tokens by their marker and notes when they came.
"""

from __future__ import annotations

import json
import re
import select
import socket
import time
from dataclasses import dataclass, field
from typing import Any

TOKEN_MARK = b'"token":'
_END = b"0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)\r\n(?:.*\r\n)*?\r\n", re.IGNORECASE)


@dataclass
class StreamResult:
    """One stream: when it was asked for, and the time of arrival and number of tokens of each read."""

    started: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    answered: bool = False
    failed: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens received."""
        return sum(count for _, count in self.arrivals)

    @property
    def time_to_first_token(self) -> float:
        """Seconds."""
        return self.arrivals[0][0] - self.started

    def intervals(self) -> list[float]:
        """Seconds between reads that brought tokens, per token."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return [(later - earlier) / count for (earlier, _), (later, count) in pairs for _ in range(count)]


def post(path: str, body: dict[str, Any]) -> bytes:
    """A POST request as bytes."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def _connect(port: int, count: int, poll: select.epoll) -> dict[int, tuple[socket.socket, StreamResult]]:
    """Connections by their file number, each with an empty result."""
    sockets = {}
    for _ in range(count):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets[connection.fileno()] = (connection, StreamResult(0.0))
        poll.register(connection.fileno(), select.EPOLLIN)
    return sockets


def run_streams(
    port: int, requests: list[bytes], *, keep_bodies: bool = False, timeout: float = 300.0
) -> list[StreamResult]:
    """Send all requests at once, each on a connection of its own, and read every stream to its end."""
    poll = select.epoll()
    sockets = _connect(port, len(requests), poll)
    results = [result for _, result in sockets.values()]
    for (connection, result), request in zip(list(sockets.values()), requests, strict=True):
        result.started = time.perf_counter()
        connection.sendall(request)
    deadline = time.perf_counter() + timeout
    tails: dict[int, bytes] = dict.fromkeys(sockets, b"")
    # Of answers without chunks: DJL Serving sends so what it has whole at once.
    missing: dict[int, int] = {}
    while sockets:
        events = poll.poll(1.0)
        now = time.perf_counter()
        if now > deadline:
            raise TimeoutError(f"{len(sockets)} streams did not end within {timeout:g} s")
        for number, _ in events:
            connection, result = sockets[number]
            data = connection.recv(1 << 16)
            # A marker cut in two by the end of a read is counted with the next.
            seen = tails[number] + data
            count = seen.count(TOKEN_MARK)
            tails[number] = seen[-(len(TOKEN_MARK) - 1) :]
            if not result.answered:
                result.answered = True
                if b" 200 " not in data[:16]:
                    result.failed = data[:400].decode(errors="replace")
                if length := _LENGTH.search(data):
                    missing[number] = int(length[1]) + length.end()
            if number in missing:
                missing[number] -= len(data)
            if count:
                result.arrivals.append((now, count))
            if keep_bodies:
                result.body += data
            if not data or data.endswith(_END) or missing.get(number) == 0 or result.failed:
                poll.unregister(number)
                connection.close()
                del sockets[number]
    poll.close()
    return results


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie; nan for none."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
