"""Clients that are a burden, many at once, in a process of their own:

    python -m tests.support.crowd PORT IDLE READERS SENDERS FLOODERS

`ready` is printed once all are there; they stay until standard input is closed. Idle clients hold a connection, half of
them after a request. Readers ask for long streams and read some bytes per second. Senders send a head or a body a byte
at a time. Flooders send what is refused as fast as they can: addresses and heads without end, bodies of 50 MB, more
requests than may wait, pipelined ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.support.client import body, raw_post, wordy

PING = b"GET /ping HTTP/1.1\r\nHost: test\r\n\r\n"
_STREAM_TOKENS = 1_000_000
_AT_ONCE = 200
Client = Callable[[int, int], Awaitable[None]]


@dataclass(frozen=True)
class Crowd:
    """How many of each kind."""

    idle: int = 10_000
    readers: int = 200
    senders: int = 100
    flooders: int = 20


FULL = Crowd()


@contextlib.contextmanager
def crowded(port: int, crowd: Crowd) -> Iterator[None]:
    """The crowd is there until the block ends."""
    program = [sys.executable, "-m", "tests.support.crowd", str(port), *map(str, astuple(crowd))]
    root = Path(__file__).parent.parent.parent
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n", "the crowd could not connect"
            yield
        finally:
            process.kill()


async def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """A socket for the event loop, connected to a port of this machine."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def _idle(port: int, number: int, there: asyncio.Semaphore, held: list[socket.socket]) -> None:
    loop = asyncio.get_running_loop()
    async with there:
        connection = await connect(port)
        if number % 2:
            await loop.sock_sendall(connection, PING)
            await loop.sock_recv(connection, 4096)
        held.append(connection)


async def _reader(port: int, _: int) -> None:
    loop = asyncio.get_running_loop()
    with await connect(port, 4096) as connection:
        await loop.sock_sendall(connection, wordy(_STREAM_TOKENS))
        while await loop.sock_recv(connection, 256):  # noqa: ASYNC110
            await asyncio.sleep(0.5)


async def _sender(port: int, number: int) -> None:
    loop = asyncio.get_running_loop()
    request = raw_post(body(4), "X-Slow: " + "a" * 500)
    # Half of them take long for the head, half for the body.
    start = 0 if number % 2 else request.index(b"\r\n\r\n") + 4
    with await connect(port) as connection:
        await loop.sock_sendall(connection, request[:start])
        for position in range(start, len(request)):
            await asyncio.sleep(0.2)
            await loop.sock_sendall(connection, request[position : position + 1])
        await loop.sock_recv(connection, 4096)


async def _flooder(port: int, number: int) -> None:
    loop = asyncio.get_running_loop()
    kinds = (
        b"GET /" + b"a" * 2_000_000,
        PING[:-2] + b"X: y\r\n" * 200_000,
        raw_post(b"[" + b" " * 50_000_000 + b"]"),
        raw_post(json.dumps({"inputs": "the wolf", "parameters": {"max_new_tokens": 500}}).encode()) * 200,
        PING * 20_000,
    )
    with await connect(port) as connection:
        reading = asyncio.ensure_future(_read_all(connection))
        try:
            await loop.sock_sendall(connection, kinds[number % len(kinds)])
            await reading
        finally:
            reading.cancel()


async def _read_all(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
        while await asyncio.wait_for(loop.sock_recv(connection, 1 << 18), 5):
            pass


async def _again_and_again(client: Client, port: int, number: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            await client(port, number)
        await asyncio.sleep(0.01)


async def _crowd(port: int, crowd: Crowd) -> None:
    held: list[socket.socket] = []
    places = asyncio.Semaphore(_AT_ONCE)
    await asyncio.gather(*(_idle(port, number, places, held) for number in range(crowd.idle)))
    kinds: list[tuple[Client, int]] = [
        (_reader, crowd.readers),
        (_sender, crowd.senders),
        (_flooder, crowd.flooders),
    ]
    tasks = [
        asyncio.ensure_future(_again_and_again(client, port, number))
        for client, count in kinds
        for number in range(count)
    ]
    await asyncio.sleep(2)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    os.nice(5)
    given = [int(argument) for argument in sys.argv[1:]]
    asyncio.run(_crowd(given[0], Crowd(*given[1:])))
