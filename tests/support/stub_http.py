"""Servers for clients' tests: one that a function answers, and one of OpenAI's chat API with a way to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.asgi import listening


class Asked(NamedTuple):
    """A request that has arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


Answer = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


def chunked(*pieces: bytes) -> bytes:
    """Chunks of a body."""
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def streamed(*pieces: bytes) -> bytes:
    """A whole response in chunks."""
    return HEAD + chunked(*pieces) + END


def whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def usage_events(tokens: int) -> list[bytes]:
    """Events of a chat, one for each token, with the usage in each; the last one has the reason of the end."""
    return [
        b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":%b}],"usage":{"prompt_tokens":7,'
        b'"completion_tokens":%d}}\n\n' % (b'"length"' if number == tokens else b"null", number)
        for number in range(1, tokens + 1)
    ]


@contextlib.asynccontextmanager
async def stub_server(answer: Answer) -> AsyncIterator[int]:
    """The port of a server in this event loop; connections end with the block."""
    writers: set[asyncio.StreamWriter] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                asked = await _read(reader)
                await answer(asked, writer)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for writer in writers:
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, orjson.loads(body) if body else None)


# -- A server of OpenAI's chat API in a thread: streams of the requested length, and a way to fail ---------------------


class OpenAiStub:
    """`fails_after`: requests that succeed before all others fail. `hangs_after`: before all others have no response.

    `seconds`: of each token.
    """

    def __init__(
        self,
        fails_after: int | None = None,
        seconds: float = 0.0,
        tokenizer: bool = True,
        hangs_after: int | None = None,
    ) -> None:
        self.fails_after, self.hangs_after, self.seconds, self.tokenizer = fails_after, hangs_after, seconds, tokenizer
        self.requests: list[Request] = []
        self.bodies: list[dict[str, Any]] = []

    async def chat(self, request: Request) -> Response:
        self.requests.append(request)
        body = await request.json()
        self.bodies.append(body)
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return PlainTextResponse("the queue is full", 429)

        async def events() -> AsyncIterator[bytes]:
            if self.hangs_after is not None and len(self.bodies) > self.hangs_after:
                await asyncio.Event().wait()
            for event in usage_events(body["max_tokens"]):
                await asyncio.sleep(self.seconds)
                yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub"}]})

    async def tokenize(self, request: Request) -> Response:
        if not self.tokenizer:
            return PlainTextResponse("", 404)
        return JSONResponse({"count": 2 * len((await request.json())["prompt"].split())})

    @contextlib.asynccontextmanager
    async def application(self) -> AsyncIterator[Starlette]:
        yield Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Its address."""
        with listening(self.application) as url:
            yield url
