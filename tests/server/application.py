"""The routes over models on played hosts, a client of them, and a client of one connection on a played transport."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from djl_trtllm.batching.statistics import Histogram
from djl_trtllm.config import Options
from djl_trtllm.model import Tokenizer
from djl_trtllm.server.access import EVERYBODY, Access
from djl_trtllm.server.connections import Connections
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import Generation, SessionRequests
from djl_trtllm.server.http_protocol import HttpProtocol
from djl_trtllm.server.management import ModelRoutes
from djl_trtllm.server.metrics import MetricsPage
from djl_trtllm.server.routes import Routes
from djl_trtllm.service.clients import Clients, Sessions
from djl_trtllm.service.lifecycle import ServedModel
from tests.support.asgi import Client
from tests.support.in_process import PROMPT, played_model
from tests.support.virtual_time import at_end


class Application:
    """Routes over a registry, and their client."""

    def __init__(
        self,
        store: Path | None = None,
        max_request_size: int = 1000,
        sessions: Sessions | None = None,
        access: Access = EVERYBODY,
        clients: Clients | None = None,
        monitor: bool | None = None,
    ) -> None:
        self.lives: list[str] = []
        options = Options(
            max_request_size=max_request_size, stream_write_timeout=30.0, wlm_error_http_code=529, monitor=monitor
        )
        context = ServerContext(options, access=access)
        context.clients = clients or context.clients
        self.registry = context.registry
        self.counts = context.counts
        self.models = ModelRoutes(self.registry, store, 5.0)
        metrics = MetricsPage(self.registry, self.counts, Histogram())
        routes = Routes(context, self.models, metrics, Generation(context, SessionRequests(sessions)))
        self.monitor = routes.monitor
        self.app = routes.router(self._life)
        self.client = Client(self.app)

    async def load(self, tokenizer: Tokenizer, name: str = "story", workers: int = 1, **options: Any) -> ServedModel:
        """Add a model and load it."""
        model = ServedModel(name, f"/{name}")
        self.registry.add(model)
        directory = options.pop("directory", Path("/story"))
        await model.load(lambda: played_model(tokenizer, directory, **options), workers)
        return model

    async def close(self) -> None:
        """End everything."""
        await self.models.close()
        for model in self.registry.models.values():
            await model.close()

    @asynccontextmanager
    async def _life(self, router: Router) -> AsyncIterator[None]:
        self.lives.append("begun")
        yield
        self.lives.append("ended")


@asynccontextmanager
async def application(tokenizer: Tokenizer | None = None, **options: Any) -> AsyncIterator[Application]:
    """An application, with a model `story` if there is a tokenizer; closed at the end.

    `store`, `max_request_size`, `sessions`, `access`, `clients` and `monitor` are the server's, the other options the
    model's.
    """
    application = await _made(tokenizer, **options)
    yield application
    await application.close()


async def started(tokenizer: Tokenizer | None = None, **options: Any) -> Application:
    """The same, closed at the end of the test."""
    application = await _made(tokenizer, **options)
    at_end(application.close)
    return application


async def _made(tokenizer: Tokenizer | None, **options: Any) -> Application:
    names = ("store", "max_request_size", "sessions", "access", "clients", "monitor")
    made = Application(**{name: options.pop(name) for name in names if name in options})
    if tokenizer is not None:
        await made.load(tokenizer, **options)
    return made


def body(tokens: int = 4, *, stream: bool = False, **parameters: Any) -> bytes:
    """A request for tokens."""
    return orjson.dumps({"inputs": PROMPT, "parameters": {"max_new_tokens": tokens, **parameters}, "stream": stream})


GET = b"GET /ping HTTP/1.1\r\nHost: test\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: test\r\nContent-Length: 6\r\n\r\n"
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = {"max_header_size": 1024, "max_header_count": 10, "max_url_size": 128}


class Wire(asyncio.Transport):
    """A transport that keeps what is written; `done` are the calls that were made."""

    def __init__(self, connection: socket.socket | None = None) -> None:
        self.extra = extra = dict[str, Any](socket=connection)
        if connection is not None:  # as real ones keep its addresses
            with suppress(OSError):
                extra["sockname"] = connection.getsockname()
                extra["peername"] = connection.getpeername()
        super().__init__(extra)
        self.written = b""
        self.done: set[str] = set()
        self.unsent = 0

    def write(self, data: Any) -> None:
        if "eof" in self.done:
            raise RuntimeError("Cannot call write() after write_eof()")  # as real ones do
        self.written += bytes(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.done.add("eof")

    def is_closing(self) -> bool:
        return bool(self.done & {"close", "abort"})

    def close(self) -> None:
        self.done.add("close")

    def abort(self) -> None:
        self.done.add("abort")

    def pause_reading(self) -> None:
        self.done.add("pause")

    def resume_reading(self) -> None:
        self.done.discard("pause")

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol


class Peer:
    """A connection to `application`; without one, every request is answered with "ok" as soon as `hold` is set.

    `beside` is a peer of the same server.
    """

    def __init__(
        self,
        application: ASGIApp | None = None,
        connection: socket.socket | None = None,
        beside: Peer | None = None,
        **options: Any,
    ) -> None:
        context = ServerContext.open(Options(**{**LIMITS, **options}))
        self.connections: Connections = beside.connections if beside else Connections(context)
        self.state = ServerState()
        self.wire = Wire(connection)
        self.hold: asyncio.Event | None = None
        self.seen: list[tuple[str, bytes | None]] = []
        self.config = Config(
            application or self._answer,
            interface="asgi3",
            log_config=None,
            ws_max_size=context.options.max_request_size,
            ws_per_message_deflate=False,
        )
        self.config.load()
        self.protocol = self._made()
        self.protocol.connection_made(self.wire)
        self.watch = asyncio.ensure_future(self.connections.watch())
        self.left = False
        at_end(self.leave)

    def _made(self) -> HttpProtocol:
        return HttpProtocol(self.connections, self.config, self.state)

    async def accept(self, connection: socket.socket) -> None:
        """Another connection of the same server, on a real transport."""
        await asyncio.get_running_loop().connect_accepted_socket(self._made, connection)

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
        """End the connection; at the end of the test this happens by itself."""
        if self.left:
            return
        self.left = True
        self.protocol.connection_lost(None)
        self.watch.cancel()
        await asyncio.gather(self.watch, return_exceptions=True)
        assert not self.connections.busy and not self.connections.idle
        assert self.connections.context.bodies.used == 0
