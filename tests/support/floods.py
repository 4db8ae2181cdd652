"""Clients that are a burden, many at once, in a process of their own:

    python -m tests.support.floods PORT CLIENTS

CLIENTS are the numbers of each kind, in JSON; PORT is that of gRPC for the kinds of `GRPC`. `ready` is printed once
they are there, and what came in all, in JSON, when standard input is closed.
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
import struct
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from djl_trtllm.api.dialects.triton.rpc import SERVICE, ModelInferRequest
from tests.support.client import BINARY, CONTINUATION, HANDSHAKE, PING, PING_FRAME, body, frame, lmi, raw_post, wordy

# -- clients of Triton's gRPC that send what is refused, and clients that open streams and read nothing ----------------

_HELD_SECONDS = 5
_REQUESTS = 50
"""The requests of one stream."""
# Otherwise all clients of the process share a connection.
_OPTIONS = (("grpc.use_local_subchannel_pool", 1),)


def _infer(text: str, tokens: int = 1, *, inputs: int = 0) -> bytes:
    """A message with a prompt, and with `inputs` that nobody knows."""
    message = ModelInferRequest(model_name="ensemble")
    given = [("text_input", "BYTES", struct.pack("<I", len(text)) + text.encode())]
    given += [("max_tokens", "INT32", struct.pack("<i", tokens)), ("stream", "BOOL", b"\1")]
    given += [(f"input{number}", "INT32", bytes(4)) for number in range(inputs)]
    for name, datatype, data in given:
        message.inputs.add(name=name, datatype=datatype).shape.extend((1, 1))
        message.raw_input_contents.append(data)
    made: bytes = message.SerializeToString()
    return made


async def call(port: int, count: collections.Counter[str]) -> None:
    """Refused calls, one after the other."""
    messages = (b"\xff" * 1_000_000, _infer("wolf", inputs=20_000), _infer("wolf " * 1_000_000))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        for message in messages:
            try:
                await channel.unary_unary(f"/{SERVICE}/ModelInfer")(message)
                count["OK"] += 1
            except grpc.aio.AioRpcError as error:
                count[error.code().name] += 1


async def open_stream(port: int, count: collections.Counter[str]) -> None:
    """Streams of many tokens that nobody reads."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        stream = channel.stream_stream(f"/{SERVICE}/ModelStreamInfer")()
        try:
            for _ in range(_REQUESTS):
                await stream.write(_infer("the wolf", 300))
            count["held"] += 1
            await asyncio.sleep(_HELD_SECONDS)
        except grpc.aio.AioRpcError as error:
            count[error.code().name] += 1
        except asyncio.InvalidStateError:
            count["closed"] += 1


_HEAD = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_READ_SECONDS = 5
_PAUSE = 0.01
_LOOKS = 100
BEGUN = 5
"""Answers, connections or bytes that say that a flood has begun."""
SILENT = "kinds without an answer"
"""What a count has for the kinds of which none of these came, if there are such."""
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
    "pipelining": lambda: (PING * 20_000,),
    "bodies": lambda: (raw_post(b"[" + b" " * 5_000_000 + b"]"),),
    "WebSocket frames": lambda: (_websocket(frame(PING_FRAME) * 200_000),),
    "WebSocket messages": lambda: (
        _websocket(frame(BINARY, end=False), frame(CONTINUATION, b"x", end=False) * 200_000),
        _websocket(frame(BINARY, end=False), frame(CONTINUATION, b"x" * 60_000, end=False) * 80),
        _websocket(frame(BINARY, b"x") * 10_000),
    ),
}
"""What clients send again and again; with several, each client one of them."""
Count = collections.Counter[str]
Client = Callable[[int, Count], Awaitable[None]]


async def connect(port: int, receive_buffer: int | None = None) -> socket.socket:
    """A socket for the event loop, connected to a port of this machine."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


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
    """Half of them have sent a request."""
    loop = asyncio.get_running_loop()
    with await connect(port) as connection:
        count["held"] += 1
        if count["held"] % 2:
            await loop.sock_sendall(connection, PING)
            await loop.sock_recv(connection, 4096)
        await loop.sock_recv(connection, 1)
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
    """Open as many streams as a socket may wait for, and read nothing."""
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
FLOODS = (*SENT, *HELD, *GRPC)


def clients_of(kind: str, number: int) -> list[Client]:
    """This number of clients of this kind."""
    if kind in HELD or kind in GRPC:
        return [(HELD | GRPC)[kind]] * number
    sent = SENT[kind]()
    return [_sender(sent[each % len(sent)]) for each in range(number)]


async def _flood(port: int, numbers: Mapping[str, int]) -> Count:
    counts: dict[str, Count] = {kind: collections.Counter() for kind, number in numbers.items() if number}
    ended = asyncio.Event()

    async def again(client: Client, count: Count) -> None:
        # Cancelling is not enough: asyncio.wait_for of Python 3.11 may lose it.
        while not ended.is_set():
            try:
                await client(port, count)
            except OSError as error:
                count[type(error).__name__] += 1
            await asyncio.sleep(_PAUSE)

    clients = [(client, counts[kind]) for kind in counts for client in clients_of(kind, numbers[kind])]
    tasks = [asyncio.ensure_future(again(*each)) for each in clients]
    idle = counts.get("idle connections", collections.Counter())
    for _ in range(_LOOKS):
        begun = all(counts.values()) and sum(count.total() for count in counts.values()) >= BEGUN
        if begun and idle["held"] >= numbers.get("idle connections", 0):
            break
        await asyncio.sleep(0.1)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    ended.set()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    silent = collections.Counter({SILENT: sum(not count for count in counts.values())})
    return sum(counts.values(), silent)


@contextlib.contextmanager
def flooded(port: int, numbers: Mapping[str, int]) -> Iterator[Count]:
    """The flood goes on until the block ends. Then its count has the statuses of the responses, and what else came."""
    command = [sys.executable, "-m", "tests.support.floods", str(port), json.dumps(numbers)]
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


@dataclass(frozen=True)
class Crowd:
    """Several kinds at once, and how many of each. Flooders send what is refused, as fast as they can."""

    idle: int = 10_000
    readers: int = 200
    senders: int = 100
    flooders: int = 20

    @property
    def numbers(self) -> dict[str, int]:
        kinds = ("addresses", "headers", "bodies", "pipelining", "long prompts")
        held = {"idle connections": self.idle, "slow readers": self.readers, "slow senders": self.senders}
        return held | {kind: self.flooders // len(kinds) for kind in kinds}


def main() -> None:
    """Flood until standard input is closed."""
    port, numbers = int(sys.argv[1]), json.loads(sys.argv[2])
    os.nice(5)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    print(json.dumps(asyncio.run(_flood(port, numbers))))


if __name__ == "__main__":
    main()
