"""HTTP on one connection: uvicorn's protocol, with limits.

uvicorn parses requests and answers them; it does not bound them. Here the parser gets a piece at a time, what is not
body is counted, one request is read after the other, and every state has a deadline. docs/design.md says why it is
this and not another server.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from djl_trtllm.server.connections import SLOWEST_BODY, Connections, Refusal, has_left, reset
from djl_trtllm.server.exchange import CONNECTION, REFUSED, REST
from djl_trtllm.server.light_event import LightEvent
from djl_trtllm.server.request_head import announces_body, refused, without_offer
from djl_trtllm.server.websocket_protocol import WebSocketProtocol

_PIECE = 1024
"""Bytes that the parser gets at once, so that little is parsed beyond a limit or beyond the end of a request."""
_SHORTEST_REQUEST = 16
_MOST_AHEAD = 65536
"""Bytes of requests that wait for the response to the one before, from which on no more are read."""
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 1 << 20
"""A refused client gets time to read why, but its request is not read to the end."""


class HttpProtocol(HttpToolsProtocol):
    """One connection: the `ServerConnection` of its requests."""

    # With these in its dictionary, that would be too large to share its keys with those of other connections.
    __slots__ = (
        "_ahead",
        "_beside",
        "_body",
        "_connections",
        "_fields",
        "_head_read",
        "_last",
        "_left",
        "_limits",
        "_lingered",
        "_lost",
        "_paused",
        "_piece_size",
        "_read",
        "_refused",
        "deadline",
    )

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.deadline = inf
        self._connections = connections
        self._limits = connections.options
        self._head_read = self._read = True
        self._beside = self._piece_size = self._body = self._left = self._fields = self._lingered = 0
        self._last, self._ahead = b"", bytearray()
        self._paused = self._refused = False
        self._lost: Callable[[], None] | None = None
        self.parser = None  # type: ignore[assignment]  # it takes a kilobyte: there is one while a request is read
        self.pipeline = ()  # type: ignore[assignment]  # an empty deque has 760 bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self.flow._is_writable_event = LightEvent(is_set=True)  # type: ignore[assignment]
        self._connections.enter(self)
        self._idle_until(self._limits.keep_alive_timeout)
        if has_left(self.transport):
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._forget(len(self._ahead))
        super().connection_lost(exc)
        self._call_lost()
        self._unset_keepalive_if_required()
        # They refer to this connection: the garbage collector, which stops the event loop, would have to free them.
        self.scope = self.cycle = None  # type: ignore[assignment]

    def handle_websocket_upgrade(self) -> None:
        self._connections.leave(self)
        super().handle_websocket_upgrade()
        protocol = self.transport.get_protocol()
        if isinstance(protocol, WebSocketProtocol) and protocol.refusal is not None:
            self._connections.note(protocol.refusal)
            self._report(protocol.refusal)

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES:
                self.transport.abort()
            return
        self._unset_keepalive_if_required()
        read = 0 if self._ahead else self._parse(data)
        if read < len(data) and not self._refused:
            self._keep(data[read:])

    def _parse(self, data: bytes | bytearray) -> int:
        """Read up to the end of a request. Returns the number of bytes read."""
        start = 0
        while start < len(data) and not self._answering():
            end = start + self._piece(data, start)
            try:
                self._feed(bytes(data[start:end]))
            except httptools.HttpParserUpgrade:
                self.handle_websocket_upgrade()
                return len(data)
            except (httptools.HttpParserError, Refusal) as error:
                self._refuse(Refusal.of(error))
                return len(data)
            start = end
        if self._read:
            self.parser = None  # type: ignore[assignment]
        return min(start, len(data))

    def _answering(self) -> bool:
        """Whether a request has been read and not been answered."""
        return self._read and self.cycle is not None and not self.cycle.response_complete

    def _piece(self, data: bytes | bytearray, start: int) -> int:
        """How many bytes the parser gets: up to the end of a body of known length or of a head, else a few."""
        if self._left:
            return self._left
        if self._head_read and not self._read:
            return _PIECE
        # A head that has begun may end with the first byte.
        before, least = (b"", _SHORTEST_REQUEST - 2) if self._head_read else (self._last, 0)
        end = (before + data[start : start + _PIECE]).find(b"\r\n\r\n", least)
        return _PIECE if end < 0 else end + 4 - len(before)

    def _feed(self, piece: bytes) -> None:
        self._piece_size = len(piece)
        self._last = (self._last + piece[-3:])[-3:]
        self._beside += len(piece)
        while piece:
            piece = self._fed(piece)
        self._check_size()

    def _fed(self, piece: bytes) -> bytes:
        """Feed the parser. Returns what to feed it next: the head again, if it offers what is not taken."""
        if cast(Any, self.parser) is None:  # it takes a kilobyte: there is one while a request is read
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                raise
            self._piece_size = self._beside
            return without_offer(self.parser, self.url, self.headers) + piece[upgrade.args[0] :]
        return b""

    def _should_upgrade(self) -> bool:
        """Whether the request opens a WebSocket. Other offers are ignored, such as that of HTTP/2 by Java's client."""
        return (
            self.parser.get_method() == b"GET"
            and not announces_body(self.headers)
            and (self.cycle is None or self.cycle.response_complete)
            and super()._should_upgrade()
        )

    def _check_size(self) -> None:
        # What a chunked body has besides its content may be as large as that.
        if self._beside > self._limits.max_header_size + self._body:
            what = "trailers and chunk headers are" if self._head_read else "the head of the request is"
            raise Refusal(431, f"{what} larger than max_header_size={self._limits.max_header_size} bytes")

    def _keep(self, data: bytes) -> None:
        """Keep what came of the next request, which is read when this one is answered."""
        if not self._connections.context.bodies.take(len(self._ahead), len(data)):
            self.reset()
            return
        self._ahead += data
        if len(self._ahead) > _MOST_AHEAD and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _go_on(self) -> None:
        if not self._answering() and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._forget(self._parse(self._ahead))
            if self._paused and len(self._ahead) <= _MOST_AHEAD and not self.transport.is_closing():
                self._paused = False
                self.transport.resume_reading()

    def _forget(self, size: int) -> None:
        del self._ahead[:size]
        self._connections.context.bodies.release(size)

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        cast(Scope, self.scope).update({CONNECTION: self, REST: None})
        self._connections.start(self)
        self.deadline = self.loop.time() + self._limits.header_read_timeout
        self._head_read = self._read = False
        self._beside = self._piece_size
        self._body = self._left = self._fields = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_url_size:
            raise Refusal(414, f"the address is longer than max_url_size={self._limits.max_url_size} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > self._limits.max_header_count:
            raise Refusal(431, f"there are more than max_header_count={self._limits.max_header_count} headers")
        if not self._head_read:  # nothing uses trailers
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_size()
        if self.parser.get_method() == b"CONNECT":
            raise Refusal(501, "this server is no proxy")
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # it is read again
        self._connections.admit(self, self.url.partition(b"?")[0])
        before = self.cycle
        if before is not None and not before.response_complete:
            # What follows the end of a chunked body may have been parsed with it.
            self.pipeline = deque(self.pipeline)
        super().on_headers_complete()
        self._head_read = True
        self._left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        self.deadline = self.loop.time() + self._limits.body_read_timeout
        if self.cycle is not before:
            self.cycle.message_event = LightEvent()  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._beside -= size
        self._body += size
        self._left = max(0, self._left - size)
        self.deadline += size / SLOWEST_BODY
        # The refusal said that the connection goes on, so some more is read: the client may use it again.
        most = self._limits.max_request_size + _LINGER_BYTES
        if self._body > most and self.cycle is not None and self.cycle.response_complete:
            raise Refusal(413, f"the body is larger than max_request_size={self._limits.max_request_size} bytes")
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._read = True
        self._left = self._beside = 0
        self._wait_for_answer()
        super().on_message_complete()
        if self.cycle is not None and self.cycle.response_complete:
            self._idle_until(self._limits.keep_alive_timeout)

    def on_response_complete(self) -> None:
        self._lost = None
        super().on_response_complete()
        if self.expect_100_continue and not self._read and not self._body:
            # The body may come or not, so it is not known where the next request begins.
            self.transport.close()
        if self.transport.is_closing():
            self.deadline = self.loop.time() + self._limits.stream_write_timeout
        elif self._ahead:
            self.loop.call_soon(self._go_on)
        elif self._read and self.cycle.response_complete:
            self._idle_until(self._limits.keep_alive_timeout)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        task = self.loop.create_task(self._run(cycle, app))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _run(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Run the application. A response that goes on without it has no task: uvicorn looks at it at its end."""
        scope = cast(Scope, cycle.scope)
        try:
            await app(scope, cycle.receive, cycle.send)
        except BaseException as error:
            await cycle.run_asgi(partial(_outcome, error))
            return
        if (rest := scope[REST]) is None:
            await cycle.run_asgi(partial(_outcome, None))
        else:
            scope["headers"].clear()
            rest.add_done_callback(partial(self._finish, cycle))

    def _finish(self, cycle: RequestResponseCycle, _: object) -> None:
        # Of several that were parsed together, uvicorn marks only the last one when the client leaves.
        cycle.disconnected |= self.transport.is_closing()
        super()._start_asgi_task(cycle, partial(_outcome, None))

    def when_lost(self, call: Callable[[], None]) -> None:
        if self.cycle is None or self.cycle.disconnected:
            call()
        else:
            self._lost = call

    def _call_lost(self) -> None:
        call, self._lost = self._lost, None
        if call is not None:
            call()

    def write_part(self, part: bytes) -> bool:
        cycle = self.cycle
        if cycle is None or cycle.disconnected or self.flow.write_paused or not cycle.chunked_encoding:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_answer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        """The application has as long as it needs, but the client has to read."""
        if self._answering():
            self.deadline = self.loop.time() + self._limits.stream_write_timeout if self.flow.write_paused else inf

    # -- the end -------------------------------------------------------------------------------------------------------

    def _idle_until(self, seconds: float) -> None:
        self._connections.rest(self)
        self.deadline = self.loop.time() + seconds

    def expire(self) -> None:
        """The deadline of its state is over."""
        if self._refused or self._read or self.transport.is_closing():  # idle, or its client does not read
            self.drop()
        elif self._head_read:
            seconds = self._limits.body_read_timeout
            self._refuse(Refusal(408, f"the request body did not come within body_read_timeout={seconds:g} seconds"))
        else:
            seconds = self._limits.header_read_timeout
            self._refuse(Refusal(408, f"the headers did not come within header_read_timeout={seconds:g} seconds"))

    def drop(self) -> None:
        """Close it, and do not wait for a client that does not read."""
        self._connections.leave(self)
        if self._refused or self.transport.get_write_buffer_size() or self.transport.is_closing():
            self.reset()
        else:
            self.transport.close()

    def reset(self) -> None:
        reset(self.transport)

    def _refuse(self, refusal: Refusal) -> None:
        """Answer a request that is not read further, if it can still be answered, and close the connection."""
        self._refused = True
        self.deadline = self.loop.time() + _LINGER_SECONDS
        self._connections.note(refusal)
        of_this = self._head_read and not self._read
        if not self._head_read:
            self._report(refusal)
        if self.cycle is not None and not self.cycle.response_complete:
            cast(Scope, self.cycle.scope)[REFUSED] = refusal.status
            self.cycle.disconnected = True
            self.cycle.waiting_for_100_continue = False
            self.cycle.message_event.set()
            self._call_lost()
            if self.cycle.response_started or not of_this or self.pipeline:  # or another one is being answered
                self.reset()
                return
            of_this = False
        if not of_this or self.cycle is None:
            self.transport.write(refusal.reply(self.server_state.default_headers))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _report(self, refusal: Refusal) -> None:
        """Report a request that no application gets to see; of its head there may be a part."""
        method = self.parser.get_method() if self.url else b""
        served = refused(method, self.url, self.headers, self._limits.request_id_header_key)
        served.status, served.error = refusal.status, Refusal.__name__
        self._connections.context.telemetry.ended(served)


async def _outcome(error: BaseException | None, *_: object) -> None:
    """An application that has run before."""
    if error is not None:
        raise error
