"""The engine process's end of the socket to the server."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator

from djl_trtllm.executor.protocol import Deframer, FromEngine, ToEngine, decode_to_engine, frame

_LAST_WORD_SECONDS = 1.0
_REST_SECONDS = 0.05
"""The server sends the rest of what a socket had no room for as soon as there is some, unless it is very busy."""


class Disconnected(Exception):
    """The server closed its end of the socket."""


class Channel:
    """Blocking sends (a slow server slows the engine; a dead one raises Disconnected), messages out of reads."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._deframer = Deframer()
        self._bodies: deque[bytes] = deque()
        self._sending = threading.Lock()
        # Not select.select: it takes no descriptor above 1023, and a server with many connections passes such on.
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: FromEngine) -> None:
        unsent = memoryview(frame(message))
        with self._sending:
            try:
                while unsent:
                    try:
                        unsent = unsent[self._socket.send(unsent) :]
                    except BlockingIOError:  # an event loop that reads from a socket makes it non-blocking
                        self._writable.poll()
            except OSError as error:
                raise Disconnected from error

    def send_last(self, message: FromEngine) -> None:
        """Send before the process ends, from any thread; given up after a second."""
        if self._sending.acquire(timeout=_LAST_WORD_SECONDS):
            with contextlib.suppress(OSError):
                self._socket.settimeout(_LAST_WORD_SECONDS)
                self._socket.sendall(frame(message))

    def receive(self, *, block: bool, rest: bool = False) -> Iterator[ToEngine]:
        """All messages that have arrived; with `block`, waits for at least one. Those not taken come the next time.

        With `rest`, a message of which there is a part is waited for, a moment: what the server sends may be more than
        a socket holds, and otherwise a socketful would arrive in each iteration.
        """
        bodies = self._bodies
        while bodies or self._readable.poll(self._patience(block=block, rest=rest)):
            if not bodies:
                try:
                    data = self._socket.recv(1 << 18)
                except ConnectionResetError as error:  # it went with something of ours unread
                    raise Disconnected from error
                if not data:
                    raise Disconnected
                bodies.extend(self._deframer.feed(data))
            while bodies:
                block = False
                yield decode_to_engine(bodies.popleft())

    def _patience(self, *, block: bool, rest: bool) -> float | None:
        """How many milliseconds to wait for more."""
        if block:
            return None
        return 1000 * _REST_SECONDS if rest and self._deframer.inside_message else 0
