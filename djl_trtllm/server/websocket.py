"""SageMaker's bidirectional streaming: every message of a WebSocket is a request. And the bounds of a WebSocket."""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from math import inf
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from djl_trtllm.api.base import Reply
from djl_trtllm.api.front_end import by_name, front_end_error, with_attributes
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, ForbiddenError
from djl_trtllm.server.access import Role, WrongPort
from djl_trtllm.server.connections import SLOWEST_BODY, Connections, HttpRefusal, has_unread, reset
from djl_trtllm.server.context import ServerContext
from djl_trtllm.server.exchange import CONNECTION
from djl_trtllm.service.clients import Places, label
from djl_trtllm.telemetry import ServedRequest

_MOST_FRAMES = 16
"""Frames after which other connections have their turn."""
_PIECE = 1024
"""Bytes that the parser gets at once, so that it makes few frames of them."""
_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""The response to a head that is too large; websockets before 17.0 sends none."""
_IDLE, _INVALID_DATA, _TOO_MUCH, _INTERNAL_ERROR, _TRY_AGAIN = 1001, 1007, 1008, 1011, 1013
"""The codes with which a socket is closed."""


def offers_websocket(headers: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a head without a body offers a WebSocket. Other offers are ignored, such as HTTP/2 by Java's client."""
    given = dict(headers)
    options = given.get(b"connection", b"").lower().split(b",")
    return (
        given.get(b"upgrade", b"").lower() == b"websocket"
        and b"upgrade" in [option.strip() for option in options]
        and b"transfer-encoding" not in given
        and all(value == b"0" for name, value in headers if name == b"content-length")
    )


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket, from its handshake on, and its bounds.

    uvicorn bounds a message, and pings its client. Here some frames are parsed at a time, so that many small ones delay
    nobody else; waiting and incomplete messages count as body memory; and a client has a time to send its messages to
    their end and to read its responses.
    """

    def __init__(self, connections: Connections, addresses: Mapping[str, Any], **options: Any) -> None:
        """`addresses` are those of the HTTP connection, as ASGI has them, with its scheme."""
        super().__init__(**options)
        self.server, self.client = addresses["server"], addresses["client"]
        self.scheme = "wss" if addresses["scheme"] == "https" else "ws"
        self.refusal: HttpRefusal | None = None
        """The reason for which the library has refused the handshake."""
        self._connections = connections
        self._limits = connections.options
        self._memory = connections.context.bodies
        self._ahead = bytearray()
        self._held = self._parsed = 0
        self._scheduled = False
        self._complete_by = self._read_by = inf

    @property
    def deadline(self) -> float:
        return min(self._complete_by, self._read_by)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # As the library does it, which asks the socket for its addresses.
        self.transport = cast(asyncio.Transport, transport)
        self.connections.add(self)
        self._connections.start(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._memory.release(self._held)
        super().connection_lost(exc)

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._memory.take(self._held, len(data)):
            self._fail(_TRY_AGAIN, f"too little of max_body_memory={self._memory.limit} bytes is left: try again later")
            return
        self._held += len(data)
        self._complete_by += len(data) / SLOWEST_BODY
        self._ahead += data
        if not self._scheduled:
            self._parse()
        if not self.handshake_initiated:  # the library takes less in a head
            response = b"".join(self.conn.data_to_send()) or _HEAD_TOO_LARGE
            self._refused_with(int(response.split()[1]))
            self.transport.write(response)
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refused_with(self.response.status_code)

    def _refused_with(self, status: int) -> None:
        self.refusal = HttpRefusal(status, f"expected a WebSocket handshake: {self.conn.handshake_exc}")

    def _parse(self) -> None:
        """Parse some frames; the rest follows after others had their turn, when the client reads its responses."""
        self._parsed = 0
        self._scheduled = False
        while (
            self._ahead
            and self._parsed < _MOST_FRAMES
            and self._may_parse
            and self.writable.is_set()
            and not self.transport.is_closing()
        ):
            piece = bytes(self._ahead[:_PIECE])
            del self._ahead[:_PIECE]
            super().data_received(piece)
        if self.transport.is_closing():
            return
        held = sum(map(len, (self._ahead, self.conn.reader.buffer, *self.frames)))
        self._memory.release(self._held - held)
        self._held = held
        if self.conn.current_size is None and not self.conn.reader.buffer:
            self._complete_by = inf
        elif self._complete_by == inf:
            self._complete_by = self._connections.now() + self._limits.body_read_timeout
        if self._ahead:
            self.transport.pause_reading()
            if self.writable.is_set() and self._may_parse:
                self._scheduled = True
                self.loop.call_soon(self._parse)
        elif not self.read_paused:
            self.transport.resume_reading()

    @property
    def _may_parse(self) -> bool:
        """Whether the handshake is still read, or accepted: a wrong frame between them has nothing to close."""
        return self.handshake_complete or not self.handshake_initiated

    def handle_events(self) -> None:
        self._parsed += len(self.conn.events)
        super().handle_events()

    def handle_cont(self, event: Frame) -> None:
        """Join the parts of a message: each by itself would have many times its bytes."""
        if len(self.frames) == 1:
            self.frames.append(bytearray())  # type: ignore[arg-type]
        self.frames[1] += event.data
        if event.fin:
            self.send_receive_event_to_app()

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text":
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self._fail(_INVALID_DATA, "the text message is not UTF-8")
                return
        super().send_receive_event_to_app()

    # -- writing -------------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._read_by = inf
        self._parse()

    async def send(self, message: Any) -> None:
        waited = not self.handshake_complete
        await super().send(message)
        if self.initial_response is not None and self.close_sent:
            # uvicorn 0.54 logs an error for each handshake that was refused with a response.
            self.handshake_complete = True
        elif waited and self.handshake_complete:
            self._parse()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._await_reader()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._await_reader()

    def _await_reader(self) -> None:
        self._read_by = self._connections.now() + self._limits.stream_write_timeout

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, code: int, reason: str) -> None:
        if self.handshake_complete:
            self.conn.fail(code, reason)
            self.handle_parser_exception()
        else:
            self.drop()

    def expire(self) -> None:
        """Close a socket whose message came too slowly, or whose client does not read."""
        if self._complete_by < self._read_by and not self.transport.is_closing():
            seconds = self._limits.body_read_timeout
            self._complete_by = inf
            self._fail(_TOO_MUCH, f"the message did not come within body_read_timeout={seconds:g} seconds")
        else:
            self.drop()

    def has_unread(self) -> bool:
        return has_unread(self.transport)

    def drop(self) -> None:
        """Close the socket without waiting for a client that does not read."""
        reset(self.transport)


logger = logging.getLogger(__name__)

PATH = "/invocations-bidirectional-stream"
_REQUEST_PATH = "/invocations"
_MOST_SOCKETS = 512
"""The most open WebSockets. A client that is alone may have half of them (`Places`)."""
_MOST_WAITING = 16
_LONGEST_REASON = 120
"""The longest reason in bytes: a close frame has 123 bytes for it."""
_UNFINISHED = "the response cannot be finished"


class BidirectionalStreams:
    """An ASGI application: WebSockets here, HTTP and the lifespan in `application`.

    A message is the body of a request to `/invocations`, and every part of its response is a message. Requests of one
    socket are answered one after the other. The application that answers is the server's own, so parameters, formats,
    errors and limits are those of `POST /invocations`, with the headers and the query of the handshake. A handshake
    needs what a request to `/invocations` needs: its API key, and the port of the requests.

    Messages are read all the time, so that pings are answered and a client that leaves is seen at once. A client that
    sends more than may wait is disconnected.
    """

    def __init__(self, application: ASGIApp, context: ServerContext) -> None:
        self._application = application
        self._context = context
        self._places = Places(_MOST_SOCKETS)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # A coroutine of its own would be there as long as the request.
        return (self._serve if scope["type"] == "websocket" else self._application)(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        headers = by_name(Headers(scope=scope).items())
        client, refusal = self._admit(scope, headers)
        if refusal is not None:
            identifier = self._context.request_id(with_attributes(headers))
            name, path = label(client), scope["path"]
            served = ServedRequest(identifier, "GET", path, headers, client=name, status=refusal.status)
            self._context.telemetry.ended(served)
            await _refuse(scope, send, refusal)
        else:
            try:
                # At once, before any model is asked: SageMaker waits 250 ms.
                await send({"type": "websocket.accept"})
                await _Socket(self._application, scope, receive, send, self._context).run()
            finally:
                self._places.leave(client)

    def _admit(self, scope: Scope, headers: Mapping[str, str]) -> tuple[str, Reply | None]:
        """Return the client of a handshake and its refusal; without a refusal it has a place."""
        address = scope.get("client")
        client_of = partial(self._context.clients.client, headers=headers, address=address and address[0])
        if scope["path"].removeprefix(scope.get("root_path", "")) != PATH:
            return client_of(None), front_end_error(404, f"there is no WebSocket at {scope['path']}")
        try:
            key = self._context.access.check(Role.INFER, headers, scope.get("server"))
        except WrongPort as error:
            return client_of(None), front_end_error(404, f"there is nothing at {PATH}: {error}")
        except AuthenticationError as error:
            reply = DEFAULT.encode_error(error, Options())
            return client_of(None), reply._replace(headers=(*reply.headers, ("WWW-Authenticate", "Bearer")))
        except ForbiddenError as error:
            return client_of(None), DEFAULT.encode_error(error, Options())
        client = client_of(None if key is None else key.name)
        if not self._places.take(client):
            return client, front_end_error(503, f"too many WebSockets: {self._places}; close one")
        return client, None


async def _refuse(scope: Scope, send: Send, reply: Reply) -> None:
    """Refuse the handshake."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return
    length = str(len(reply.body))
    fields = (("content-type", reply.content_type), ("content-length", length), *reply.headers)
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in fields]
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": reply.body})


@dataclass
class _Request:
    """A message as a request. With `text` both are text messages; `complete`: the response has ended."""

    body: bytes
    text: bool
    complete: bool = False
    read: bool = False


@dataclass(eq=False)
class _Socket:
    """One open socket. It has one task while nothing is answered: most sockets of a crowd wait."""

    application: ASGIApp
    scope: Scope
    receive: Receive
    send: Send
    context: ServerContext
    _waiting: deque[_Request] = field(default_factory=deque)
    _gone: asyncio.Event = field(default_factory=asyncio.Event)
    _held: int = 0
    _answering: asyncio.Task[None] | None = None
    """Answers the requests that wait; None while there are none."""
    _stopped: bool = False
    _end: tuple[int, str] | None = None
    """The code and the reason with which `run` closes the socket, once it is `_stopped`."""

    def __post_init__(self) -> None:
        options = self.context.options
        self._bodies = self.context.bodies
        self._most_bytes, self._idle_seconds = options.max_request_size, options.websocket_idle_timeout
        self._idle: asyncio.TimerHandle | None = None
        self._reading: asyncio.Task[Any] | None = None

    # -- as a `ServerConnection` -----------------------------------------------------------------------------------

    def reset(self) -> None:
        self._gone.set()

    def write_part(self, part: bytes) -> bool:
        return False

    def when_lost(self, call: Callable[[], None]) -> None:
        """Do nothing: `run` cancels the task that answers."""

    # -- life ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take messages until the client is gone, sends too much, or nothing for long."""
        self._reading = asyncio.current_task()
        self._await_message()
        try:
            end = await self._read()
        except asyncio.CancelledError:
            if not self._stopped:
                raise
            end = self._end
        finally:
            self._reading = None
            self._stop_timer()
            self._gone.set()
            if self._answering is not None:  # what the client asked for is cancelled
                self._answering.cancel()
                await asyncio.gather(self._answering, return_exceptions=True)
            self._bodies.release(self._held)
        if end is not None:
            code, reason = end
            logger.info("a WebSocket is closed with %d: %s", code, reason)
            with contextlib.suppress(OSError):  # the client is gone
                await self.send({"type": "websocket.close", "code": code, "reason": reason[:_LONGEST_REASON]})

    async def _read(self) -> tuple[int, str] | None:
        """Take messages. Returns code and reason for a client that sends too much, None for one that is gone."""
        while True:
            message = await self.receive()
            if message["type"] == "websocket.disconnect":
                return None
            text = message.get("text")
            body = message.get("bytes") or b"" if text is None else text.encode()
            if not self._bodies.take(self._held, len(body)):
                return _TRY_AGAIN, f"too little of max_body_memory={self._bodies.limit} bytes is left: try again later"
            self._waiting.append(_Request(body, text is not None))
            self._held += len(body)
            if len(self._waiting) > _MOST_WAITING or self._held > self._most_bytes:
                return _TOO_MUCH, f"at most {_MOST_WAITING} messages of {self._most_bytes} bytes in all may wait"
            if self._answering is None:
                self._stop_timer()
                self._answering = asyncio.create_task(self._answer_all())

    def _stop_timer(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None  # uvloop's refers to this socket also afterwards

    def _await_message(self) -> None:
        end = _IDLE, f"no message within websocket_idle_timeout={self._idle_seconds:g} seconds"
        self._idle = asyncio.get_running_loop().call_later(self._idle_seconds, self._stop, end)

    def _stop(self, end: tuple[int, str] | None = None) -> None:
        """End `run`, which closes the socket with a code and a reason."""
        if self._reading is not None:  # else it ends already
            self._stopped, self._end = True, end
            self._reading.cancel()

    async def _answer_all(self) -> None:
        while self._waiting:
            request = self._waiting.popleft()
            self._held -= len(request.body)
            self._bodies.release(len(request.body))  # it counts as the body of a request now
            try:
                await self._answer(request)
            except OSError:  # the client is gone
                self._stop()
                return
            except asyncio.CancelledError:  # `run` has ended, or what the application waits for was cancelled
                self._stop((_INTERNAL_ERROR, _UNFINISHED))
                raise
            except Exception:
                logger.exception("answering a message of a WebSocket failed")
            if not request.complete:
                # The format cannot express an error, as HTTP bodies without an end.
                self._stop((_INTERNAL_ERROR, _UNFINISHED))
                return
        self._answering = None
        if self._reading is not None:
            self._await_message()

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
            "headers": [(name, value) for name, value in self.scope["headers"] if name != b"content-length"],
            "extensions": {},
            CONNECTION: self,
        }
        await self.application(scope, receive, send)
