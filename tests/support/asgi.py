"""An ASGI application, driven directly: every message that it sends is seen, and its client may do as it likes.

client = Client(app)
answer = await client.post("/invocations", b"...")          # to its end
stream = client.begin("POST", "/invocations", b"...")       # beside the test
stream.stop_reading(); stream.read_on(); stream.leave(); stream.vanish()
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Scope

from djl_trtllm.server.exchange import CONNECTION
from tests.support.processes import PATIENCE
from tests.support.server import free_port

JSON = {"content-type": "application/json"}


class Connection:
    """One request, and its response. It reads until the test stops it."""

    def __init__(
        self, method: str, path: str, body: bytes | None = b"", headers: Mapping[str, str] = JSON, query: str = ""
    ) -> None:
        """A request whose `body` is None is sent later, with `upload`."""
        self.sent: list[Message] = []
        self.written: list[bytes] = []
        """Parts that were sent without a message."""
        self.aborted = False
        self.scope: Scope = {
            "type": "http",
            "method": method,
            "path": path,
            "query_string": query.encode(),
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
            CONNECTION: self,
        }
        self._received: asyncio.Queue[Message] = asyncio.Queue()
        self._reads = asyncio.Event()
        self._reads.set()
        self._vanished = self._left = False
        self._lost: Callable[[], None] = lambda: None
        self._task: asyncio.Future[None]
        if body is not None:
            self.upload(body)

    def begin(self, app: ASGIApp) -> Connection:
        """Let the application handle the request, beside the test."""
        self._task = asyncio.ensure_future(app(self.scope, self.receive, self.send))
        return self

    async def end(self) -> Connection:
        """Wait until the application is done with it."""
        await self._task
        return self

    def cancel(self) -> None:
        """What a server does with a request that it gives up."""
        self._task.cancel()

    def done(self) -> bool:
        """Whether the application is done with it."""
        return self._task.done()

    # -- what the client does --------------------------------------------------------------------------------------

    def upload(self, body: bytes, *, more: bool = False) -> None:
        """Send a part of the body, by default the last."""
        self._received.put_nowait({"type": "http.request", "body": body, "more_body": more})

    def leave(self) -> None:
        """Close the connection."""
        self._left = True
        self._received.put_nowait({"type": "http.disconnect"})
        self._lost()

    def stop_reading(self) -> None:
        """Let `send` wait from now on, as with a transport whose buffer is full."""
        self._reads.clear()

    def read_on(self) -> None:
        """Whatever waits is read."""
        self._reads.set()

    def vanish(self) -> None:
        """What waits to be sent, and whatever is sent from now on, fails."""
        self._vanished = True
        self._reads.set()

    # -- what the client sees --------------------------------------------------------------------------------------

    @property
    def status(self) -> int:
        """The status; 0 as long as there is none."""
        return int(self.sent[0]["status"]) if self.sent else 0

    @property
    def headers(self) -> dict[str, str]:
        """The headers by their names."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.sent[0]["headers"]}

    @property
    def parts(self) -> list[bytes]:
        """The parts of the body that are not empty."""
        return [part for message in self.sent[1:] if (part := message.get("body", b""))]

    @property
    def body(self) -> bytes:
        """The body so far."""
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        """The body, read as JSON."""
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        """The body, read as JSON lines."""
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def complete(self) -> bool:
        """Whether the body has ended. It ends once, and nothing comes after."""
        ends = [not message.get("more_body", False) for message in self.sent[1:]]
        assert True not in ends[:-1]
        return bool(ends) and ends[-1]

    # -- what the application calls --------------------------------------------------------------------------------

    async def receive(self) -> Message:
        """ASGI's `receive`."""
        return await self._received.get()

    async def send(self, message: Message) -> None:
        """ASGI's `send`."""
        await self._reads.wait()
        if self._vanished:
            raise OSError("the client is gone")
        kinds = [each["type"] for each in [*self.sent, message]]
        assert kinds == ["http.response.start", *["http.response.body"] * (len(kinds) - 1)]
        self.sent.append(message)

    def when_lost(self, call: Callable[[], None]) -> None:
        """As our server has it."""
        if self._left:
            call()
        self._lost = call

    def write_part(self, part: bytes) -> bool:
        """As our server has it."""
        if self._vanished or not self._reads.is_set():
            return False
        assert part
        assert self.sent[0]["type"] == "http.response.start"
        assert all(each.get("more_body") for each in self.sent[1:])
        self.sent.append({"type": "http.response.body", "body": part, "more_body": True})
        self.written.append(part)
        return True

    def reset(self) -> None:
        """As our server has it."""
        self.aborted = True


class Client:
    """Sends requests to an application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def begin(
        self, method: str, path: str, body: bytes | None = b"", headers: Mapping[str, str] = JSON, query: str = ""
    ) -> Connection:
        """Begin a request beside the test."""
        return Connection(method, path, body, headers, query).begin(self._app)

    async def get(self, path: str, query: str = "", method: str = "GET") -> Connection:
        """A request without a body, to its end."""
        return await self.begin(method, path, b"", {}, query).end()

    async def post(
        self, path: str, body: bytes = b"", headers: Mapping[str, str] = JSON, query: str = ""
    ) -> Connection:
        """A request with a body, to its end."""
        return await self.begin("POST", path, body, headers, query).end()


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[None]:
    """The application's life: started before the block, ended after it."""
    received: asyncio.Queue[Message] = asyncio.Queue()
    sent: asyncio.Queue[Message] = asyncio.Queue()
    life = asyncio.ensure_future(app({"type": "lifespan"}, received.get, sent.put))
    received.put_nowait({"type": "lifespan.startup"})
    assert (await sent.get())["type"] == "lifespan.startup.complete"
    yield
    received.put_nowait({"type": "lifespan.shutdown"})
    assert (await sent.get())["type"] == "lifespan.shutdown.complete"
    await life


# -- an ASGI application behind real HTTP, in a thread of this process -------------------------------------------------


_KEEP_ALIVE_SECONDS = 3600


@contextmanager
def listening(application: Callable[[], AbstractAsyncContextManager[ASGIApp]]) -> Iterator[str]:
    """The address of the application, which lives in the thread's event loop until the block ends."""
    port = free_port()
    ready = threading.Event()
    servers: list[uvicorn.Server] = []

    async def serve() -> None:
        async with application() as app:
            config = uvicorn.Config(
                app,
                port=port,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                # A client that takes some seconds to make its next request may send it just as uvicorn closes.
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
            servers.append(uvicorn.Server(config))
            ready.set()
            await servers[0].serve()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(PATIENCE)
        while not servers[0].started:
            assert thread.is_alive()
            ready.wait()
            thread.join(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        if servers:
            servers[0].should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
