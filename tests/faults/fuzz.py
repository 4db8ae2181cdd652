"""Requests of every dialect, made by a grammar and then damaged: `python -m tests.faults.fuzz`.

No response is a 500, none is missing, and nothing of them is left. The short form is `tests/faults/test_fuzz.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import enum
import itertools
import json
import math
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import httptools
import psutil
from websockets.asyncio.client import connect
from websockets.exceptions import WebSocketException

from djl_trtllm.api.dialects.triton.rpc import SERVICE, ModelInferRequest, TritonRpc
from djl_trtllm.api.registry import DIALECTS
from tests.support.client import raw_post
from tests.support.models import scripted_model
from tests.support.random_requests import random_request
from tests.support.server import Server, free_port

# -- bytes with one thing wrong ----------------------------------------------------------------------------------------

_FILLING = (b"[", b"{", b'"', b"9", b"\\")


def damaged(source: random.Random, data: bytes) -> bytes:
    """The bytes cut, with another byte, with a part missing or repeated, or with many of one kind in between."""
    at = source.randrange(len(data) + 1)
    match source.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([source.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[source.randrange(len(data) + 1) :]
        case 3:
            return data[:at] + source.choice(_FILLING) * source.choice((1, 200, 5000)) + data[at:]
        case _:
            return data * 2


# -- Makes requests from the parameter tables of every dialect. Every one follows from the seed ------------------------

MODEL = "scripted"
_PLACES = {"model": MODEL, "version": "1", "endpoint": "e", "component": "c", "name": MODEL, "region": "r"}
_HEADERS = (
    "Accept: text/event-stream",
    "Content-Type: text/plain",
    "Content-Type: application/octet-stream",
    "Content-Encoding: gzip",
    "Inference-Header-Content-Length: 5",
    "X-Amzn-SageMaker-Custom-Attributes: content-length=9;a=b",
    "X-Amzn-SageMaker-Session-Id: NEW_SESSION",
    "X-Amzn-SageMaker-Target-Model: x.tar.gz",
    "X-Request-Id: \t\x7f",
    "Accept-Encoding: gzip",
)
_FRAMING = (
    "Transfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Content-Length: 3",
    "Content-Length: +5",
    "Content-Length: 99999999999999999999",
    "Expect: 100-continue",
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: x",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
    "Host: a\r\nHost: b",
    " folded: yes",
    "X:\r\n Y",
    ": no name",
    "X" * 3000 + ": " + "y" * 3000,
)
_METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "BREW")
_OTHER_PATHS = ("/ping", "/metrics", "/openapi.json", "/models", f"/models/{MODEL}", "/adapters", "/nowhere", "/%00")
_TENSORS = ("BYTES", "INT32", "INT64", "UINT64", "FP32", "FP64", "BOOL", "INT33", "")
_SHAPES: tuple[Any, ...] = ([1, 1], [1, 1], [1], [-1, 1], [2**31 - 1, 2**31 - 1], [])
_ACTED_ON = ("prompt", "tokens", "messages", "ready")
"""Members of the bodies of actions."""


_GOOD_BODY = b'{"inputs": "the wolf", "parameters": {"max_new_tokens": 3}}'
_GOOD = b"POST /invocations HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
_GOOD %= (len(_GOOD_BODY), _GOOD_BODY)
_GOOD_END = b'"generated_text"'
"""What the response to it ends with."""


class Way(enum.Enum):
    """How a request is sent: over HTTP with whole heads, as bytes whose heads are damaged too, a message, a call.

    In a pair, such bytes follow a good request in the same piece, whose response they may not cost.
    """

    HTTP = enum.auto()
    RAW = enum.auto()
    PAIR = enum.auto()
    WEBSOCKET = enum.auto()
    GRPC = enum.auto()
    GRPC_STREAM = enum.auto()


@dataclass(frozen=True)
class Made:
    """A request. `target` is a path, or a method of gRPC; `data` what goes over the connection."""

    way: Way
    target: str
    data: bytes


def paths() -> list[str]:
    """Every path that takes a body."""
    return [_filled(path) for dialect in DIALECTS for path in (*dialect.paths, *dialect.actions)]


def _filled(path: str) -> str:
    for name, value in _PLACES.items():
        path = path.replace(f"{{{name}}}", value)
    return path


class Grammar:
    """An endless source of requests."""

    def __init__(self, seed: int) -> None:
        self._source = random.Random(seed)
        self._paths = paths()
        self._actions = {action for dialect in DIALECTS for action in dialect.actions}
        self._pages = [_filled(page) for dialect in DIALECTS for page in dialect.pages] + list(_OTHER_PATHS)
        self._methods = TritonRpc.pages

    def request(self) -> Made:
        """The next one."""
        kind = self._source.random()
        if kind < 0.02:
            return Made(Way.WEBSOCKET, "/invocations-bidirectional-stream", self._post()[1])
        if kind < 0.06:
            return self._call()
        if kind < 0.11:
            return self._raw()
        if kind < 0.14:
            raw = self._raw()
            return Made(Way.PAIR, raw.target, _GOOD + raw.data)
        if kind < 0.18:
            return self._other()
        path, body, headers = self._post()
        return Made(Way.HTTP, path, raw_post(body, *headers, path=path))

    # -- ways ----------------------------------------------------------------------------------------------------------

    def _post(self) -> tuple[str, bytes, list[str]]:
        """A path, a body for it or, now and then, for another one, and a header."""
        source = self._source
        asked = random_request(source)
        path = source.choice(self._paths) if source.random() < 0.3 else asked.path
        made = {"inputs": self._inputs()} if path.endswith("/infer") else asked.body
        if type(made) is dict and path in self._actions:
            made = {source.choice(_ACTED_ON): source.choice(("the wolf", [1, 2], -1, True, None)), **made}
        body = json.dumps(made).encode()
        if source.random() < 0.2:
            body = damaged(source, body)
        return path, body, [source.choice(_HEADERS)] if source.random() < 0.2 else []

    def _other(self) -> Made:
        """Other methods, and pages with queries."""
        source = self._source
        path = source.choice(self._pages)
        if source.random() < 0.3:
            path += source.choice(("?", "/", "%2e%2e", "?a=%ff", "?name=\x7f", "/../ping", "?" + "x=y&" * 500))
        data = raw_post(self._post()[1] if source.random() < 0.2 else b"", path=path)
        return Made(Way.HTTP, path, data.replace(b"POST", source.choice(_METHODS).encode(), 1))

    def _raw(self) -> Made:
        source = self._source
        path, body, headers = self._post()
        headers += source.sample(_FRAMING, source.randrange(3))
        source.shuffle(headers)
        data = raw_post(body, *headers, path=path, version=source.choice(("1.1", "1.0", "2.0", "", "9" * 300)))
        return Made(Way.RAW, path, damaged(source, data))

    def _call(self) -> Made:
        source = self._source
        message = ModelInferRequest(model_name=source.choice((MODEL, "ensemble", "", "../x")), id="7")
        for tensor in self._inputs():
            made = message.inputs.add(name=tensor["name"], datatype=tensor["datatype"])
            made.shape.extend(size for size in tensor["shape"] if -(2**63) <= size < 2**63)
            message.raw_input_contents.append(_raw_tensor(tensor["data"][0]))
        data = message.SerializeToString()
        if source.random() < 0.3:
            data = damaged(source, data)
        kind = source.random()
        if kind < 0.4:
            return Made(Way.GRPC_STREAM, "ModelStreamInfer", data)
        return Made(Way.GRPC, "ModelInfer" if kind < 0.8 else source.choice(self._methods), data)

    def _inputs(self) -> list[dict[str, Any]]:
        """The fields of a request of `generate`, as tensors."""
        source = self._source
        asked = random_request(source, "generate").body
        values = {"text_input": "the wolf", "max_tokens": 3} | (asked if type(asked) is dict else {})
        return [
            {
                "name": name,
                "shape": source.choice(_SHAPES) if source.random() < 0.1 else [1, 1],
                "datatype": source.choice(_TENSORS) if source.random() < 0.1 else _datatype(value),
                "data": [value],
            }
            for name, value in values.items()
        ]


def _datatype(value: Any) -> str:
    return {bool: "BOOL", int: "INT32", float: "FP32"}.get(type(value), "BYTES")


def _raw_tensor(value: Any) -> bytes:
    if isinstance(value, bool):
        return bytes([value])
    if isinstance(value, int):
        return (value % 2**32).to_bytes(4, "little")
    text = str(value).encode(errors="surrogatepass")
    return len(text).to_bytes(4, "little") + text


# -- Sends made requests to a server, and looks at what is left of them ------------------------------------------------

_AT_ONCE = 32
_ANSWER_SECONDS = 300
_LOOKS = 10
_MEGABYTES_MORE = 64
DEFECTS = ("500", "INTERNAL", "UNKNOWN", "0")
"""Statuses that no request may have. `0` is no status."""
_SHOWN_LINES = 40


@dataclass
class Outcome:
    """What came of the requests. `wrong` are those that broke a rule."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    ways: collections.Counter[Way] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    """Megabytes of the server and its engine process: at rest, and after each tenth of the requests, and at the end."""


def fuzz_requests(count: int, seed: int = 0, seconds: float = math.inf) -> Outcome:
    """Send `count` requests to a server, or as many as there is time for."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as folder:
        model = scripted_model(Path(folder) / "model", {"steps_per_second": 5000}, **{"option.max_output_len": 64})
        grpc_port = free_port()
        with Server(model, {"SERVING_TRITON_GRPC_PORT": str(grpc_port)}) as server:
            server.wait_for_ping()
            server.note_rest()
            outcome.memory.append(_megabytes(server))
            asyncio.run(_send(server, grpc_port, Grammar(seed), count, outcome, time.monotonic() + seconds))
            outcome.wrong += _left(server, outcome)
    return outcome


async def _send(
    server: Server, grpc_port: int, grammar: Grammar, count: int, outcome: Outcome, end_time: float
) -> None:
    left = itertools.takewhile(lambda _: time.monotonic() < end_time, range(count))
    looks = {count * look // _LOOKS - 1 for look in range(1, _LOOKS + 1)}

    async def client() -> None:
        async with Client(server.port, grpc_port) as sender:
            for number in left:
                made = grammar.request()
                try:
                    status, end = await asyncio.wait_for(sender.send(made), _ANSWER_SECONDS)
                except (asyncio.TimeoutError, OSError, ValueError) as error:
                    sender.give_up()
                    status, end = "0", repr(error).encode()
                outcome.statuses[status] += 1
                outcome.ways[made.way] += 1
                if status in DEFECTS:
                    outcome.wrong.append(f"{status} {made.way} {made.target} {made.data[:900]!r}: {end!r}")
                if number in looks:
                    outcome.memory.append(_megabytes(server))

    await asyncio.gather(*(client() for _ in range(_AT_ONCE)))


def _left(server: Server, outcome: Outcome) -> list[str]:
    server.check_leaks()
    wrong = []
    if server.ping() != 200:
        wrong.append(f"/ping is {server.ping()}")
    log = server.log
    if tracebacks := [number for number, line in enumerate(log) if "Traceback" in line]:
        shown = log[max(tracebacks[0] - 2, 0) : tracebacks[0] + _SHOWN_LINES]
        wrong.append("\n".join([f"{len(tracebacks)} tracebacks in the log, the first:", *shown]))
    if restarts := server.metric("executor_restarts_total"):
        wrong.append(f"{restarts:.0f} engine processes ended")
    outcome.memory.append(_megabytes(server))
    first, half, last = outcome.memory[1], outcome.memory[len(outcome.memory) // 2], outcome.memory[-1]
    if last > max(first, half) + _MEGABYTES_MORE:
        wrong.append(f"the server grew: {outcome.memory} MB")
    return wrong


def _megabytes(server: Server) -> int:
    processes: list[psutil.Process] = [server.process, *server.descendants()]
    return sum(int(process.memory_info().rss) for process in processes) >> 20


# -- clients of the fuzzer: each sends a request its way, and returns the status and the end of the response -----------

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
            case Way.PAIR:
                return await self._pair(made.data)
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

    async def _pair(self, data: bytes) -> tuple[str, bytes]:
        """The first response, whole, has the status 200; there are no rules for that to the second request."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        response = b""
        try:
            writer.write(data)
            while _GOOD_END not in response and (part := await reader.read(_UNREAD_BYTES)):
                response += part
        finally:
            writer.close()
        found = _STATUS.match(response) if _GOOD_END in response else None
        return found[1].decode() if found else "0", response[-_END:]

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


# -- `python -m tests.faults.fuzz [--requests N] [--seed S] [--minutes M]` ---------------------------------------------


def main() -> int:
    """Print what came of it; 1 if a rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description="Damaged requests.")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of requests, at most")
    given = parser.parse_args()
    began = time.monotonic()
    outcome = fuzz_requests(given.requests, given.seed, given.minutes * 60)
    wrong = outcome.wrong
    print(f"{outcome.ways.total()} requests in {time.monotonic() - began:.0f} s")
    print({way.name: count for way, count in outcome.ways.items()})
    print(dict(sorted(outcome.statuses.items())))
    print("MB at rest, after each tenth and at the end:", *outcome.memory)
    print(len(wrong), "rules broken", *wrong[:20], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
