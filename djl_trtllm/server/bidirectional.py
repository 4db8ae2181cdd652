"""SageMaker's bidirectional streaming: a WebSocket on which every message is a request.

A message is the body of a request to `/invocations`, and every part of its response is a message. Requests of one
socket are answered one after the other. The application that answers is the server's own, so parameters, formats,
errors and limits are those of `POST /invocations`, with the headers and the query of the handshake.

A handshake needs what a request to `/invocations` needs: its API key, and the port of the requests.

Messages are read all the time, so that pings are answered and a client that leaves is seen at once. What waits is
bounded: a client that sends more is disconnected.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from djl_trtllm.api import Reply
from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.api.headers import properties, request_id
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, ForbiddenError
from djl_trtllm.server.access import Role, WrongPort
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import CONNECTION
from djl_trtllm.telemetry import ServedRequest

logger = logging.getLogger(__name__)

PATH = "/invocations-bidirectional-stream"
_REQUEST_PATH = "/invocations"
_MOST_SOCKETS = 256
_MOST_WAITING = 16
_TOO_MUCH, _INTERNAL_ERROR, _TRY_AGAIN = 1008, 1011, 1013
_LONGEST_REASON = 120
"""A close frame has 123 bytes for it."""


class BidirectionalStreams:
    """An ASGI application: WebSockets here, HTTP and the lifespan in `application`."""

    def __init__(self, application: ASGIApp, context: ServerContext) -> None:
        self._application = application
        self._context = context
        self._open = 0

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # A coroutine of its own would be there as long as the request.
        return (self._serve if scope["type"] == "websocket" else self._application)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        refusal = self._refusal(scope)
        if refusal is not None:
            given = properties(Headers(scope=scope).items())
            identifier = request_id(given, self._context.options.request_id_header_key)
            self._context.telemetry.ended(ServedRequest(identifier, "GET", scope["path"], given, status=refusal.status))
            await _refuse(scope, send, refusal)
        else:
            self._open += 1
            try:
                # At once, before any model is asked: SageMaker waits 250 ms.
                await send({"type": "websocket.accept"})
                most, bodies = self._context.options.max_request_size, self._context.bodies
                await _Socket(self._application, scope, receive, send, most, bodies).run()
            finally:
                self._open -= 1

    def _refusal(self, scope: Scope) -> Reply | None:
        """Why there is no socket for this handshake, None if there is one."""
        if scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            return front_end_error(404, f"there is no WebSocket at {scope['path']}")
        server = scope.get("server")
        try:
            self._context.access.check(
                Role.INFER, properties(Headers(scope=scope).items()), None if server is None else server[1]
            )
        except WrongPort as error:
            return front_end_error(404, f"there is nothing at {PATH}: {error}")
        except AuthenticationError as error:
            reply = DEFAULT.encode_error(error, Options())
            return reply._replace(headers=(*reply.headers, ("WWW-Authenticate", "Bearer")))
        except ForbiddenError as error:
            return DEFAULT.encode_error(error, Options())
        if self._open >= _MOST_SOCKETS:
            logger.warning("a WebSocket is refused: %d are open", self._open)
            return front_end_error(503, f"{self._open} WebSockets are open, and the server takes no more")
        return None


async def _refuse(scope: Scope, send: Send, reply: Reply) -> None:
    """Refuse the handshake."""
    if "websocket.http.response" in scope.get("extensions", {}):
        fields = [("content-type", reply.content_type), ("content-length", str(len(reply.body))), *reply.headers]
        headers = [(name.lower().encode(), value.encode("latin-1")) for name, value in fields]
        await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": reply.body})
    else:
        await send({"type": "websocket.close"})


@dataclass
class _Request:
    """A message; `text`: it came as text, and so does its response. `complete`: the response has its end."""

    body: bytes
    text: bool
    complete: bool = False
    read: bool = False


@dataclass(eq=False)
class _Socket:
    """One open socket."""

    application: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    max_waiting_bytes: int
    bodies: BodyMemory
    _waiting: deque[_Request] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _held: int = 0

    # -- as a `ServerConnection` -----------------------------------------------------------------------------------

    def reset(self) -> None:
        self._gone.set()

    def write_part(self, part: bytes) -> bool:
        return False

    def when_lost(self, call: Callable[[], None]) -> None:
        """The task that answers is cancelled then."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        answering = asyncio.create_task(self._answer_all())
        try:
            # The reader ends when the client is gone or sends too much: what it asked for is cancelled.
            await asyncio.wait({reader, answering}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._gone.set()
            for task in (reader, answering):
                task.cancel()
            await asyncio.gather(reader, answering, return_exceptions=True)
            self.bodies.release(self._held)

    async def _read(self) -> None:
        """Take messages until the client is gone or sends too much."""
        while True:
            message = await self.receive()
            if message["type"] == "websocket.disconnect":
                return
            text = message.get("text")
            body = message.get("bytes") or b"" if text is None else text.encode()
            if not self.bodies.take(self._held, len(body)):
                await self._close(_TRY_AGAIN, f"max_body_memory={self.bodies.limit} bytes leave too little for this")
                return
            self._waiting.append(_Request(body, text is not None))
            self._held += len(body)
            if len(self._waiting) > _MOST_WAITING or self._held > self.max_waiting_bytes:
                limits = f"at most {_MOST_WAITING} messages of {self.max_waiting_bytes} bytes in all may wait"
                await self._close(_TOO_MUCH, limits)
                return
            self._arrived.set()

    async def _answer_all(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                request = self._waiting.popleft()
                self._held -= len(request.body)
                self.bodies.release(len(request.body))  # it counts as the body of a request now
                try:
                    await self._answer(request)
                except OSError:
                    return  # the client is gone
                except Exception:
                    logger.exception("answering a message of a WebSocket failed")
                if not request.complete:
                    # The format cannot express an error, as HTTP bodies without an end.
                    await self._close(_INTERNAL_ERROR, "the response cannot be finished")
                    return

    async def _answer(self, request: _Request) -> None:
        async def receive() -> Message:
            if request.read:
                await self._gone.wait()
                return {"type": "http.disconnect"}
            request.read = True
            return {"type": "http.request", "body": request.body, "more_body": False}

        async def send(message: Message) -> None:
            if message["type"] != "http.response.body":
                return
            if part := message.get("body", b""):
                await self.send(
                    {"type": "websocket.send", "text": part.decode("utf-8", "replace")}
                    if request.text
                    else {"type": "websocket.send", "bytes": part}
                )
            request.complete = not message.get("more_body", False)

        scope = {
            **self.scope,
            "type": "http",
            "scheme": "http",
            "method": "POST",
            "path": _REQUEST_PATH,
            "raw_path": _REQUEST_PATH.encode(),
            "headers": [(name, value) for name, value in self.scope["headers"] if name != b"content-length"],
            "extensions": {},
            CONNECTION: self,
        }
        await self.application(scope, receive, send)

    async def _close(self, code: int, reason: str) -> None:
        logger.info("a WebSocket is closed with %d: %s", code, reason)
        await self.send({"type": "websocket.close", "code": code, "reason": reason[:_LONGEST_REASON]})
