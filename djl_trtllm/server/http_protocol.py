"""HTTP/1.1 on one connection: httptools parses requests, which are answered through ASGI, and bounded.

The parser gets a piece at a time, bytes beside the body are counted, one request is read after the other, and every
state has a deadline. docs/design.md says why this is not another server.

What ASGI needs (scope, request-response cycle, upgrades) is from uvicorn 0.54, protocols/http/httptools_impl.py.
Copyright © 2017-present, Encode OSS Ltd. BSD 3-Clause: uvicorn-LICENSE.txt beside this file.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from math import inf
from operator import itemgetter
from typing import Any, cast
from urllib.parse import unquote

import httptools
import msgspec
from starlette.types import Message, Scope
from uvicorn import Config
from uvicorn.server import ServerState

from djl_trtllm.api.front_end import by_name
from djl_trtllm.server.connections import (
    SLOWEST_BODY,
    Addresses,
    Connections,
    HttpRefusal,
    has_unread,
    reset,
    status_line,
    whole_response,
)
from djl_trtllm.server.exchange import CONNECTION, REFUSED, REST
from djl_trtllm.server.websocket import WebSocketProtocol, offers_websocket
from djl_trtllm.telemetry import ServedRequest

logger = logging.getLogger(__name__)

_PIECE = 1024
"""Bytes that the parser gets at once, so that it parses little beyond a limit or beyond the end of a request."""
_SHORTEST_REQUEST = 16
_MOST_WAITING = 65536
"""Bytes that may wait before reading stops: of a body that the application has not taken, or of the next requests."""
_LONGEST_KEPT = 128
"""The longest address, in bytes, of which something is kept for other requests."""
_LINGER_SECONDS = 2.0
_LINGER_BYTES = 1 << 20
"""A refused client gets time to read why, but its request is not read to the end."""
_WRITER_FIRST_SECONDS = 1.0
"""A response whose writer has a timer of its own logs whose client did not read: the connection's comes later."""
_NOT_IN_NAMES = re.compile(rb'[\x00-\x1f\x7f()<>@,;:\[\]={} \t\\"]')
_NOT_IN_VALUES = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


class HttpProtocol(asyncio.Protocol):
    """One connection: the `ServerConnection` of its requests.

    Most connections are idle, and most responses go on without a task. So there is a parser, which takes a kilobyte,
    while a request is read only, and an event while something waits for it only. Python keeps the names of up to 30
    attributes once for all objects of a class.
    """

    def __init__(self, connections: Connections, config: Config, server_state: ServerState) -> None:
        self.deadline = inf
        self.loop = asyncio.get_running_loop()
        self.transport: asyncio.Transport
        self.unwritable: asyncio.Event | None = None
        """An event while the client does not read, set when it reads again; otherwise None."""
        self._connections = connections
        self._limits = connections.options
        self._config = config
        self._server_state = server_state
        self._addresses: dict[str, Any] = {}
        self._parser: Any = None
        self._cycles: tuple[RequestResponseCycle, ...] = ()
        """The requests without a complete response. There is one, or none; more if the parser found the next one behind
        the end of a chunked body. The first is being answered, and the last may still be read."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_read = self._read = True
        self._beside = self._piece_size = self._body = self._left = self._trailers = 0
        self._last, self._ahead = b"", bytearray()
        self._reading_paused = self._opening = False
        self._linger: int | None = None
        """Bytes that are still read and thrown away after a refusal; None before a refusal."""
        self._lost: Callable[[], None] | None = None
        self._last_reply = b""
        """The refusal of a request that is not read further, while those before it are answered."""

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        return self._server_state.default_headers

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # uvicorn only calls `shutdown`
        addresses = Addresses.of(self.transport)
        scheme = "https" if self.transport.get_extra_info("sslcontext") else "http"
        self._addresses = {"server": addresses.server, "client": addresses.client, "scheme": scheme}
        self._connections.enter(self)
        self.deadline = self._connections.now() + self._limits.keep_alive_timeout
        if addresses.client_left:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        self._server_state.connections.discard(self)
        if self._ahead:
            self._forget(len(self._ahead))
        for cycle in self._cycles:
            cycle.disconnect()
        if self.unwritable is not None:
            self.resume_writing()
        if self._lost is not None:
            self._call_lost()
        # They refer to this connection: the garbage collector, which stops the event loop, would have to free them.
        self._parser, self._cycles = None, ()

    def shutdown(self) -> None:
        """End the connection after its response: uvicorn ends."""
        if self._cycles:
            self._cycles[-1].keep_alive = False
        else:
            self.transport.close()

    def _open_later(self) -> None:
        """Open a WebSocket that had to wait, with the data that came meanwhile, if its client is still there."""
        self._opening = False
        if self._parser is None or self._linger is not None or self.transport.is_closing():
            return
        came = bytes(self._ahead)
        self._forget(len(came))
        try:
            self._open_websocket(came)
        except Exception:
            self.transport.abort()  # as the event loop does where reading fails
            raise

    def _open_websocket(self, came: bytes) -> None:
        """Open a WebSocket; `came` is the data that came behind its handshake."""
        self._connections.leave(self)
        self._server_state.connections.discard(self)
        protocol = WebSocketProtocol(
            self._connections, self._addresses, config=self._config, server_state=self._server_state, app_state={}
        )
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.data_received(_head(self._parser, self._url, self._headers))
        if came:
            protocol.data_received(came)
        if protocol.refusal is not None:
            self._connections.note(protocol.refusal)
            self._report(protocol.refusal)
        self._parser = None  # it refers to this connection

    # -- reading -------------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._linger -= len(data)
            if self._linger < 0:
                self.transport.abort()
            return
        read = 0 if self._ahead or self._opening else self._parse(data)
        if rest := data[read:]:
            self._keep(rest)

    def _parse(self, data: bytes | bytearray) -> int:
        """Read up to the end of a request. Returns the number of bytes read."""
        start = 0
        while start < len(data) and not (self._read and self._cycles):
            end = start + self._piece(data, start)
            try:
                self._feed(bytes(data[start:end]))
            except httptools.HttpParserUpgrade as upgrade:
                start += int(upgrade.args[0])
                self._opening = not self._connections.may_open(self, self._client(), self._open_later)
                if self._opening:
                    self.deadline = inf  # its client has sent all that is waited for
                    return start
                self._open_websocket(bytes(data[start:]))
                return len(data)
            except (httptools.HttpParserError, HttpRefusal) as error:
                self._refuse(HttpRefusal.of(error))
                return len(data)
            start = end
        if self._read:
            self._parser = None
        return min(start, len(data))

    def _answering(self) -> bool:
        """Whether a request has been read and not been answered."""
        return self._read and bool(self._cycles)

    def _piece(self, data: bytes | bytearray, start: int) -> int:
        """The bytes that the parser gets: up to the end of a head or a body of known length, else a few."""
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
            if self._parser is None:
                self._parser = httptools.HttpRequestParser(self)
                self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
            try:
                self._parser.feed_data(piece)
                break
            except httptools.HttpParserUpgrade as upgrade:
                if self._opens_websocket():
                    raise
                # The parser reads no body behind an offer of another protocol: it gets the head again, without it.
                self._piece_size = self._beside
                headers = [field for field in self._headers if field[0] != b"upgrade"]
                piece = _head(self._parser, self._url, headers) + piece[upgrade.args[0] :]
        self._check_size()

    def _opens_websocket(self) -> bool:
        return self._parser.get_method() == b"GET" and not self._cycles and offers_websocket(self._headers)

    def _check_size(self) -> None:
        if len(self._headers) + self._trailers > self._limits.max_header_count:
            raise HttpRefusal(431, f"there are more than max_header_count={self._limits.max_header_count} headers")
        # What a chunked body has besides its content may be as large as that.
        if self._beside > self._limits.max_header_size + self._body:
            what = "trailers and chunk headers are" if self._head_read else "the head of the request is"
            raise HttpRefusal(431, f"{what} larger than max_header_size={self._limits.max_header_size} bytes")

    def _keep(self, data: bytes) -> None:
        """Keep bytes of the next request, which is read when this one is answered."""
        if self._last_reply:
            return  # it is refused already
        bodies = self._connections.context.bodies
        if bodies.take(len(self._ahead), len(data)):
            self._ahead += data
            self.control_reading()
        else:
            self._url, self._headers = b"", []  # the report is not about the request that is being answered
            self._refuse(HttpRefusal(503, str(bodies.refusal())))

    def _go_on(self) -> None:
        waits = self._opening or self._answering()
        if not (waits or self._linger is not None or self.transport.is_closing()):
            self._forget(self._parse(self._ahead))
            self.control_reading()

    def _forget(self, size: int) -> None:
        del self._ahead[:size]
        self._connections.context.bodies.release(size)

    def control_reading(self) -> None:
        """Stop reading while many bytes wait, and go on afterwards."""
        cycles = self._cycles
        much = len(self._ahead) > _MOST_WAITING or (bool(cycles) and len(cycles[-1].body) > _MOST_WAITING)
        waits = (much or len(cycles) > 1) and self._linger is None
        if waits != self._reading_paused and not self.transport.is_closing():
            self._reading_paused = waits
            (self.transport.pause_reading if waits else self.transport.resume_reading)()

    def go_on_reading(self) -> None:
        """Read again, where fewer bytes wait than did when reading stopped."""
        if self._reading_paused:
            self.control_reading()

    # -- called by the parser ------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._connections.start(self)
        self.deadline = self._connections.now() + self._limits.header_read_timeout
        self._head_read = self._read = False
        self._beside = self._piece_size
        self._body = self._left = self._trailers = 0
        self._url, self._headers = b"", []

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > self._limits.max_url_size:
            raise HttpRefusal(414, f"the address is longer than max_url_size={self._limits.max_url_size} bytes")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_read:  # nothing uses trailers
            self._trailers += 1
            self._check_size()
        else:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._check_size()
        if self._parser.get_method() == b"CONNECT":
            raise HttpRefusal(501, "CONNECT: this server is not a proxy")
        hosts, version = list(map(itemgetter(0), self._headers)).count(b"host"), self._parser.get_http_version()
        if hosts > 1 or (not hosts and version != "1.0"):
            raise HttpRefusal(400, f"expected one header Host, which names this server, and not {hosts}")
        self._connections.admit(self, self._url.partition(b"?")[0])
        if self._parser.should_upgrade():
            return  # it opens a WebSocket, or is read again without the offer
        given = dict(self._headers)
        keep_alive = version != "1.0" and self._parser.should_keep_alive()
        announced = given.get(b"expect", b"").lower() == b"100-continue"
        cycle = RequestResponseCycle(self, self._scope(version), keep_alive, announced)
        self._head_read = True
        self._left = int(given.get(b"content-length", 0))
        self.deadline = self._connections.now() + self._limits.body_read_timeout
        self._cycles += (cycle,)
        if len(self._cycles) == 1:
            self._connections.begin(partial(self._start, cycle))
        else:
            self.control_reading()

    def _scope(self, version: str) -> Scope:
        url = self._url
        path, query = (_address if len(url) <= _LONGEST_KEPT else _address.__wrapped__)(url)
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": path,
            "query_string": query,
            "headers": self._headers,
            **self._addresses,
            CONNECTION: self,
            REST: None,
        }

    def on_body(self, body: bytes) -> None:
        size = len(body)
        self._beside -= size
        self._body += size
        self._left = max(0, self._left - size)
        self.deadline += size / SLOWEST_BODY
        if self._cycles:
            self._cycles[-1].body += body
            self._cycles[-1].notify()
            self.control_reading()
        elif self._body > self._limits.max_request_size + _LINGER_BYTES:
            # The refusal said that the connection goes on, so some more is read: the client may use it again.
            raise HttpRefusal(413, f"the body is larger than max_request_size={self._limits.max_request_size} bytes")

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        self._read = True
        self._left = self._beside = 0
        self._wait_for_answer()
        if self._cycles:
            self._cycles[-1].more_body = False
            self._cycles[-1].notify()
        else:
            self._idle_until(self._limits.keep_alive_timeout)

    # -- answering -----------------------------------------------------------------------------------------------------

    def _start(self, cycle: RequestResponseCycle) -> None:
        task = self.loop.create_task(self._run(cycle))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    async def _run(self, cycle: RequestResponseCycle) -> None:
        """Run the application. Its response may go on when this task has ended."""
        try:
            await self._config.loaded_app(cycle.scope, cycle.receive, cycle.send)
        except BaseException as error:
            logger.error("the application failed", exc_info=error)
            cycle.break_off()
            return
        if (rest := cycle.scope[REST]) is None:
            self._end(cycle)
        else:
            if self._headers is cycle.scope["headers"]:
                self._headers = []
            cycle.scope["headers"] = []  # a new list: middleware may still read the old one
            rest.add_done_callback(partial(self._end, cycle))

    def _end(self, cycle: RequestResponseCycle, _: object = None) -> None:
        if not (cycle.response_complete or cycle.disconnected or self.transport.is_closing()):
            logger.error("the application returned before its response was complete")
            cycle.break_off()

    def response_ended(self) -> None:
        """Go on after the response that is complete now."""
        ended, self._cycles = self._cycles[0], self._cycles[1:]
        self._lost = None
        self._server_state.total_requests += 1
        # Where a body that was announced may come or not, it is not known where the next request begins.
        if not ended.keep_alive or (ended.announced and ended.more_body and not self._body):
            if not (self._cycles or self._read or self.transport.is_closing()):
                # With unread bytes, a close would be a reset, which may overtake the response.
                self._say_last(b"")
                return
            self.transport.close()
        if self.transport.is_closing():
            self.deadline = self._connections.now() + self._limits.stream_write_timeout
            return
        self.go_on_reading()
        if self._cycles:
            self._connections.begin(partial(self._start, self._cycles[0]))
        elif self._last_reply:
            self._forget(len(self._ahead))
            self._say_last(self._last_reply)
        elif self._ahead:
            self.loop.call_soon(self._go_on)
        elif self._read:
            self._idle_until(self._limits.keep_alive_timeout)

    def when_lost(self, call: Callable[[], None]) -> None:
        if not self._cycles or self._cycles[0].disconnected:
            call()
        else:
            self._lost = call

    def _call_lost(self) -> None:
        call, self._lost = self._lost, None
        if call is not None:
            call()

    def write_part(self, part: bytes) -> bool:
        if self.unwritable is not None or not self._cycles or not self._cycles[0].takes_parts():
            return False
        cycle = self._cycles[0]
        self.transport.write(b"%b%x\r\n%b\r\n" % (cycle.head, len(part), part))
        cycle.head = b""
        return True

    def pause_writing(self) -> None:
        if self.unwritable is None:
            self.unwritable = asyncio.Event()
        self._wait_for_answer()

    def resume_writing(self) -> None:
        if self.unwritable is not None:
            self.unwritable.set()
            self.unwritable = None
        self._wait_for_answer()

    def _wait_for_answer(self) -> None:
        """Set the deadline while a request is answered: the client has to read, the application may take its time."""
        if self._answering():
            seconds = self._limits.stream_write_timeout + _WRITER_FIRST_SECONDS
            self.deadline = inf if self.unwritable is None else self._connections.now() + seconds

    # -- the end -------------------------------------------------------------------------------------------------------

    def _idle_until(self, seconds: float) -> None:
        self._connections.rest(self)
        self.deadline = self._connections.now() + seconds

    def expire(self) -> None:
        """Refuse a request that came too slowly, or drop the connection."""
        if self._linger is not None or self._read or self.transport.is_closing():  # idle, or its client does not read
            self.drop()
        elif self._head_read:
            seconds = self._limits.body_read_timeout
            self._refuse(
                HttpRefusal(408, f"the request body did not come within body_read_timeout={seconds:g} seconds")
            )
        else:
            seconds = self._limits.header_read_timeout
            self._refuse(HttpRefusal(408, f"the headers did not come within header_read_timeout={seconds:g} seconds"))

    def has_unread(self) -> bool:
        return has_unread(self.transport)

    def drop(self) -> None:
        """Close the connection without waiting for a client that does not read."""
        self._connections.leave(self)
        if self._linger is not None or self.transport.get_write_buffer_size() or self.transport.is_closing():
            self.reset()
        else:
            self.transport.close()

    def reset(self) -> None:
        reset(self.transport)

    def _refuse(self, refusal: HttpRefusal) -> None:
        """Answer a request that is not read further, if it can still be answered, and close the connection."""
        self._connections.note(refusal)
        of_this = self._head_read and not self._read
        before = self._cycles[:-1] if of_this else self._cycles
        if before or not self._head_read:
            self._report(refusal)
        reply = refusal.reply(self.default_headers)
        if before:
            # They came whole, in one piece with this one, and their responses are first.
            self._cycles, self._last_reply, self._read = before, reply, True
            self._wait_for_answer()
            self.control_reading()
            return
        if of_this and self._cycles:
            (cycle,) = self._cycles
            cycle.scope[REFUSED] = refusal.status
            cycle.disconnect()
            self._call_lost()
            if cycle.response_started:
                self.reset()
                return
        elif of_this:  # it has a response already
            reply = b""
        self._say_last(reply)

    def _say_last(self, reply: bytes) -> None:
        """Send the last bytes of a connection, and give the client time to read them."""
        self._linger = _LINGER_BYTES
        if reply:
            self.transport.write(reply)
        unsent = self.transport.get_write_buffer_size()
        self.deadline = self._connections.now() + (self._limits.stream_write_timeout if unsent else _LINGER_SECONDS)
        self.control_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def _client(self) -> str:
        """The client whose request this is, before its API key is known."""
        address = self._addresses["client"]
        return self._connections.context.clients.client(None, self._given(), address and address[0])

    def _given(self) -> dict[str, str]:
        """The headers of the request by name."""
        return by_name((name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers)

    def _report(self, refusal: HttpRefusal) -> None:
        """Report a request that no application gets to see. A part of its head may be missing: it is "-"."""
        given = self._given()
        path = self._url.partition(b"?")[0].decode("latin-1")
        method = self._parser.get_method().decode("latin-1") if path else "-"
        context = self._connections.context
        served = ServedRequest(context.request_id(given), method, path or "-")
        served.status, served.error = refusal.status, type(refusal).__name__
        context.telemetry.ended(served)


def _head(parser: Any, url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """The head of a request with these headers."""
    lines = [b"%b: %b\r\n" % field for field in headers]
    version = parser.get_http_version().encode()
    return b"".join([parser.get_method(), b" ", url, b" HTTP/", version, b"\r\n", *lines, b"\r\n"])


@lru_cache(maxsize=1024)
def _address(url: bytes) -> tuple[str, bytes]:
    """The decoded path of an address, and the query: most requests have the address of others."""
    address = httptools.parse_url(url)
    return unquote(address.path.decode("ascii")), address.query or b""


@lru_cache(maxsize=1024)
def _line(name: bytes, value: bytes) -> bytes:
    """The line of a header, which most responses have too. Raises RuntimeError for one that cannot be sent.

    What clients put into headers of responses is a kilobyte at most (`api.front_end`), so that lines may be kept.
    """
    if _NOT_IN_NAMES.search(name) or _NOT_IN_VALUES.search(value):
        raise RuntimeError(f"the header {name!r} of the response cannot be sent")
    return b"%b: %b\r\n" % (name, value)


class RequestResponseCycle(msgspec.Struct, eq=False):
    """One request of a connection and its response, as ASGI's `receive` and `send` have them."""

    protocol: HttpProtocol
    scope: Scope
    keep_alive: bool
    announced: bool = False
    """Whether the client sends the body if it is asked to."""
    body: bytearray = msgspec.field(default_factory=bytearray)
    more_body: bool = True
    disconnected: bool = False
    response_started: bool = False
    response_complete: bool = False
    head: bytes = b""
    """The head of the response, which goes with the first bytes of its body: each write is a system call."""
    _event: asyncio.Event | None = None
    _news: bool = False
    _asked: bool = False
    _chunked: bool = False
    _to_come: int = 0
    """Bytes of the response's body, where its length is known."""

    def takes_parts(self) -> bool:
        """Whether parts of the body may be written at once: its length is not known, and the client is there."""
        return self._chunked and not self.disconnected

    def notify(self) -> None:
        """Wake the application: there is more of the body, or there is nothing to wait for."""
        self._news = True
        if self._event is not None:
            self._event.set()

    def disconnect(self) -> None:
        """Report to the application that its client has left; what it still sends is dropped."""
        self.disconnected = True
        self.notify()

    async def receive(self) -> Message:
        transport = self.protocol.transport
        answered = self.response_started or self.disconnected or transport.is_closing()
        if self.announced and not self._asked and not answered:
            self._asked = True
            transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self._news or self.disconnected or self.response_complete):
            self._event = self._event or asyncio.Event()
            self._event.clear()
            await self._event.wait()
        self._news = False
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        self.protocol.go_on_reading()
        return {"type": "http.request", "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        while (unwritable := self.protocol.unwritable) is not None and not self.disconnected:
            await unwritable.wait()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
        elif self.response_complete:
            raise RuntimeError(f"{message['type']} after the end of the response")
        else:
            self._write_body(message.get("body", b""), more=message.get("more_body", False))

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        fields = [*self.protocol.default_headers, *headers]
        lines = [status_line(status)]
        for name, value in fields:
            lines.append((_line if len(value) <= _LONGEST_KEPT else _line.__wrapped__)(name, value))
        given = dict(fields)
        if given.get(b"connection", b"").lower() == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append(b"connection: close\r\n")
        if self.scope["method"] != "HEAD":
            length = given.get(b"content-length")
            self._to_come = int(length or 0)
            self._chunked = length is None
            if self._chunked:
                lines.append(b"transfer-encoding: chunked\r\n")
        lines.append(b"\r\n")
        self.head = b"".join(lines)

    def _write_body(self, body: bytes, *, more: bool) -> None:
        data = self.head
        if self._chunked:
            data += b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data += b"" if more else b"0\r\n\r\n"
        elif self.scope["method"] != "HEAD":
            self._to_come -= len(body)
            if self._to_come < 0 or (self._to_come and not more):
                raise RuntimeError("the body of the response has not the length that its head says")
            data += body
        self.head = b""
        self.protocol.transport.write(data)
        if not more:
            self._complete()

    def break_off(self) -> None:
        """End a response that the application does not complete, so that the client sees that it is not complete."""
        if self.disconnected or self.response_complete:
            return
        if not self.response_started:
            headers = [*self.protocol.default_headers, (b"content-type", b"text/plain; charset=utf-8")]
            self.head = whole_response(500, headers, b"Internal Server Error")
        self.protocol.transport.write(self.head)
        self.keep_alive = False
        self._complete()

    def _complete(self) -> None:
        self.response_complete = True
        self.notify()
        self.protocol.response_ended()
