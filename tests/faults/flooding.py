"""A flood of one kind, from a process of its own:

    python -m tests.faults.flooding PORT KIND CLIENTS

PORT is that of gRPC for the kinds of `GRPC`. `ready` is printed once something has come of it, and what came in all, in
JSON, when standard input is closed.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from tests.faults.grpc_flooding import call, open_stream
from tests.support.client import body, lmi, raw_post, wordy
from tests.support.crowd import connect
from tests.support.websocket import BINARY, CONTINUATION, HANDSHAKE, PING, frame

_HEAD = b"POST /invocations HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
_PING = b"GET /ping HTTP/1.1\r\nHost: test\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_READ_SECONDS = 5
_PAUSE = 0.01
_WEBSOCKET_REQUESTS = 15
_PING_RESPONSE = b"Healthy"
_LONGEST_STREAM = 300
"""Tokens of the streams that are read slowly; every engine of the tests has room for them."""


def _post(value: Any, path: str = "/invocations") -> bytes:
    return raw_post(json.dumps(value).encode(), path=path)


def _with(**parameters: Any) -> bytes:
    return _post(lmi("the wolf", **parameters))


def _nested(depth: int) -> bytes:
    start = b'{"inputs": "wolf", "parameters": {"guided_json": '
    return raw_post(start + b"[" * depth + b"]" * depth + b"}}")


def _messages(count: int) -> bytes:
    return _post({"messages": [{"role": "user", "content": "wolf"}] * count}, "/v1/chat/completions")


def _websocket(*frames: bytes) -> bytes:
    return HANDSHAKE + b"\r\n" + b"".join(frames)


SENT: dict[str, Callable[[], tuple[bytes, ...]]] = {
    "long prompts": lambda: (_post(lmi("wolf " * 2_000_000)), _post(lmi("a" * 130_000))),
    "unknown parameters": lambda: (_with(**{f"max_new_token{number}": 1 for number in range(20_000)}),),
    "stop strings": lambda: (_with(stop_sequences=["wolf" * 250_000] * 16), _with(stop_sequences=["a", "b"] * 50_000)),
    "chat messages": lambda: (_messages(500_000), _messages(5_000)),
    "nesting": lambda: (_nested(100), _nested(900), _nested(100_000)),
    "long numbers": lambda: (raw_post(b'{"inputs": "wolf", "parameters": {"seed": %s}}' % (b"9" * 1_000_000)),),
    "addresses": lambda: (b"GET /" + b"a" * 2_000_000,),
    "headers": lambda: (_HEAD + b"X: y\r\n" * 200_000, _HEAD + b"X: " + b"y" * 1_000_000),
    "trailers": lambda: (_HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 200_000,),
    "pipelining": lambda: (_PING * 20_000,),
    "bodies": lambda: (raw_post(b"[" + b" " * 5_000_000 + b"]"),),
    "WebSocket frames": lambda: (_websocket(frame(PING) * 200_000),),
    "WebSocket messages": lambda: (
        _websocket(frame(BINARY, end=False), frame(CONTINUATION, b"x", end=False) * 200_000),
        _websocket(frame(BINARY, end=False), frame(CONTINUATION, b"x" * 60_000, end=False) * 80),
        _websocket(frame(BINARY, b"x") * 10_000),
    ),
}
"""What clients send again and again; with several, each client one of them."""
Count = collections.Counter[str]
Client = Callable[[int, Count], Awaitable[None]]


def _sender(data: bytes) -> Client:
    async def send(port: int, count: Count) -> None:
        loop = asyncio.get_running_loop()
        with await connect(port) as connection:
            reading = asyncio.ensure_future(_read(connection, count))
            try:
                await loop.sock_sendall(connection, data)
                await reading
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    return send


async def _read(connection: socket.socket, count: Count) -> None:
    """Count the responses until the server closes, or sends nothing for a while."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        while data := await asyncio.wait_for(loop.sock_recv(connection, 1 << 18), _READ_SECONDS):
            found = _STATUS.findall(data)
            count.update(status.decode() for status in found)
            if found and data.count(_PING_RESPONSE) == 0:
                return


async def _idle(port: int, count: Count) -> None:
    with await connect(port) as connection:
        count["held"] += 1
        await asyncio.get_running_loop().sock_recv(connection, 1)
    count["closed"] += 1


async def _slow_reader(port: int, count: Count) -> None:
    loop = asyncio.get_running_loop()
    with await connect(port, 4096) as connection:
        await loop.sock_sendall(connection, wordy(_LONGEST_STREAM))
        while data := await loop.sock_recv(connection, 256):
            count.update(status.decode() for status in _STATUS.findall(data))
            await asyncio.sleep(0.2)


async def _slow_sender(port: int, count: Count) -> None:
    """Head and body come a byte at a time."""
    loop = asyncio.get_running_loop()
    with await connect(port) as connection:
        for byte in raw_post(body(4), "X-Slow: " + "a" * 500):
            await loop.sock_sendall(connection, bytes([byte]))
            count["bytes"] += 1
            await asyncio.sleep(0.05)


async def _websocket_reader(port: int, count: Count) -> None:
    """As many streams as a socket may wait for, of which nothing is read."""
    loop = asyncio.get_running_loop()
    long = json.dumps(lmi("the wolf", stream=True, max_new_tokens=_LONGEST_STREAM, details=True)).encode()
    with await connect(port, 4096) as connection:
        await loop.sock_sendall(connection, _websocket(frame(BINARY, long) * _WEBSOCKET_REQUESTS))
        count["held"] += 1
        await asyncio.sleep(_READ_SECONDS)


HELD: dict[str, Client] = {
    "idle connections": _idle,
    "slow readers": _slow_reader,
    "slow senders": _slow_sender,
    "WebSocket readers": _websocket_reader,
}
GRPC: dict[str, Client] = {"gRPC calls": call, "gRPC readers": open_stream}
KINDS = (*SENT, *HELD, *GRPC)


def clients_of(kind: str, number: int) -> list[Client]:
    """This number of clients of this kind."""
    if kind in HELD or kind in GRPC:
        return [(HELD | GRPC)[kind]] * number
    sent = SENT[kind]()
    return [_sender(sent[each % len(sent)]) for each in range(number)]


async def _flood(port: int, clients: list[Client]) -> Count:
    count: Count = collections.Counter()
    began, ended = asyncio.Event(), asyncio.Event()

    async def again(client: Client) -> None:
        # Cancelling is not enough: asyncio.wait_for of Python 3.11 may lose it.
        while not ended.is_set():
            try:
                await client(port, count)
            except OSError as error:
                count[type(error).__name__] += 1
            began.set()
            await asyncio.sleep(_PAUSE)

    tasks = [asyncio.ensure_future(again(client)) for client in clients]
    with contextlib.suppress(asyncio.TimeoutError):  # clients that hold a connection do not come back
        await asyncio.wait_for(began.wait(), 1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    ended.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return count


@contextlib.contextmanager
def flooded(port: int, kind: str, clients: int) -> Iterator[Count]:
    """The flood goes on until the block ends. Then its count has the statuses of the responses, and what else came."""
    command = [sys.executable, "-m", "tests.faults.flooding", str(port), kind, str(clients)]
    root = Path(__file__).parents[2]
    count: Count = collections.Counter()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", "the flood has not come"
            yield count
            process.stdin.close()
            count.update(json.loads(process.stdout.read()))
        finally:
            process.kill()


def main() -> None:
    """Flood until standard input is closed."""
    port, kind, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    os.nice(5)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(asyncio.run(_flood(port, clients_of(kind, number)))))


if __name__ == "__main__":
    main()
