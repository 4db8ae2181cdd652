"""A WebSocket on one connection: uvicorn's protocol, with limits.

uvicorn bounds a message, and pings its client. Here some frames are parsed at a time, so that many small ones delay
nobody else, what waits or is incomplete counts as body memory, and a client has to send its messages to their end and
to read its responses.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from math import inf
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

from djl_trtllm.server.connections import SLOWEST_BODY, Connections, Refusal, reset

_MOST_FRAMES = 16
"""Frames after which other connections have their turn."""
_PIECE = 1024
"""Bytes that the parser gets at once: not many more frames."""
_INVALID_DATA, _TOO_MUCH, _TRY_AGAIN = 1007, 1008, 1013


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One WebSocket, from its handshake on."""

    def __init__(self, connections: Connections, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.refusal: Refusal | None = None
        """Why the library has refused the handshake."""
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
        super().connection_made(transport)
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
            self._fail(_TRY_AGAIN, f"max_body_memory={self._memory.limit} bytes leave too little for this")
            return
        self._held += len(data)
        self._complete_by += len(data) / SLOWEST_BODY
        self._ahead += data
        if not self._scheduled:
            self._parse()
        if not self.handshake_initiated:  # the library takes less in a head
            response = b"".join(self.conn.data_to_send())
            self._refused_with(int(response[len("HTTP/1.1 ") :][:3] or HTTPStatus.BAD_REQUEST))
            self.transport.write(response)
            self.transport.close()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if self.response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refused_with(self.response.status_code)

    def _refused_with(self, status: int) -> None:
        self.refusal = Refusal(status, f"this opens no WebSocket: {self.conn.handshake_exc}")

    def _parse(self) -> None:
        """Read some of what came, and the rest when others had their turn and the client reads its responses."""
        self._parsed = 0
        self._scheduled = False
        while (
            self._ahead and self._parsed < _MOST_FRAMES and self.writable.is_set() and not self.transport.is_closing()
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
            self._complete_by = self.loop.time() + self._limits.body_read_timeout
        if self._ahead:
            self.transport.pause_reading()
            if self.writable.is_set():
                self._scheduled = True
                self.loop.call_soon(self._parse)
        elif not self.read_paused:
            self.transport.resume_reading()

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
                self._fail(_INVALID_DATA, "this is not UTF-8")
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

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self._await_reader()

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self._await_reader()

    def _await_reader(self) -> None:
        self._read_by = self.loop.time() + self._limits.stream_write_timeout

    # -- the end -------------------------------------------------------------------------------------------------------

    def _fail(self, code: int, reason: str) -> None:
        if self.handshake_complete:
            self.conn.fail(code, reason)
            self.handle_parser_exception()
        else:
            self.drop()

    def expire(self) -> None:
        """The deadline is over."""
        if self._complete_by < self._read_by and not self.transport.is_closing():
            seconds = self._limits.body_read_timeout
            self._complete_by = inf
            self._fail(_TOO_MUCH, f"the message did not come within body_read_timeout={seconds:g} seconds")
        else:
            self.drop()

    def drop(self) -> None:
        """Close it, and do not wait for a client that does not read."""
        reset(self.transport)
