"""All open connections: how many there may be, which of them makes room, and who is past its deadline."""

import asyncio
import contextlib
import logging
import select
import socket
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache
from http import HTTPStatus
from itertools import takewhile
from math import inf
from typing import NamedTuple, Protocol

from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.processes import raise_limit
from djl_trtllm.server.context import ServerContext

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.5
_TURNS = 4
"""Turns of the event loop that it takes until a connection in the kernel is accepted, made, and read."""
_TURNS_BETWEEN = 8
"""Turns of the event loop from one WebSocket that is opened to the next."""
_BEGUN = 16
"""Requests that begin in one turn of the event loop."""
_QUIET_SECONDS = 60.0
_SPARE = 64
"""Connections beyond the limit, for health checks."""
_RESERVED_DESCRIPTORS = 512
"""Descriptors that are kept for engine processes, gRPC and files."""
SLOWEST_BODY = 16384
"""Bytes of a body that extend its deadline by a second."""
_NO_LINGER = struct.pack("ii", 1, 0)
_HEALTH = (b"/ping", b"/health", b"/v2/health/live", b"/v2/health/ready")


@cache
def status_line(status: int) -> bytes:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


def whole_response(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """A response that no application writes, and after which the connection is closed."""
    fields = (*headers, (b"content-length", b"%d" % len(body)), (b"connection", b"close"))
    return b"".join([status_line(status), *(b"%b: %b\r\n" % field for field in fields), b"\r\n", body])


class HttpRefusal(Exception):
    """The refusal of a request that is not read to its end."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @classmethod
    def of(cls, error: Exception) -> "HttpRefusal":
        """The refusal that a parser's error stands for, without the stack that it was raised in."""
        cause = error.__context__ or error
        if isinstance(cause, HttpRefusal):
            return cls(cause.status, str(cause))
        return cls(400, f"this is not HTTP: {cause}")

    def reply(self, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """The response, after which the connection is closed."""
        reply = front_end_error(self.status, str(self))
        retry = [(b"retry-after", b"1")] if self.status == 503 else []
        headers = [*default_headers, (b"content-type", reply.content_type.encode()), *retry]
        return whole_response(self.status, headers, reply.body)


class Connection(Protocol):
    """A connection as the bounds see it: it has a deadline and can be closed."""

    @property
    def deadline(self) -> float:
        """The time, on the clock of `Connections.now`, at which the connection's present state must have ended."""

    def has_unread(self) -> bool:
        """Whether there is something to read: bytes of the client, or that it has left."""

    def expire(self) -> None:
        """End the state whose deadline has passed."""

    def drop(self) -> None:
        """Close the connection to make room."""


class Addresses(NamedTuple):
    """The two ends of a connection, as ASGI has them. Transports keep them: asking the socket is a system call."""

    server: tuple[str, int | None] | None
    client: tuple[str, int] | None
    """The client's address and port; None on a Unix socket."""

    @classmethod
    def of(cls, transport: asyncio.Transport) -> "Addresses":
        ours, theirs = transport.get_extra_info("sockname"), transport.get_extra_info("peername")
        client = (theirs[0], theirs[1]) if isinstance(theirs, tuple) else None
        if isinstance(ours, tuple):
            return cls((ours[0], ours[1]), client)
        return cls((ours, None) if isinstance(ours, str) else None, client)

    @property
    def client_left(self) -> bool:
        """Whether the client of a new connection has left already.

        Its requests would be those of a client without address, which would get a place of its own in the batch.
        """
        return self.client is None and self.server is not None and self.server[1] is not None


def has_unread(transport: asyncio.Transport) -> bool:
    """Whether there is something to read on a connection, in the kernel."""
    connection = transport.get_extra_info("socket")
    if connection is None or connection.fileno() < 0:  # it is closed
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def read_what_has_come() -> None:
    """Let the event loop read what the kernel has for it."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


def reset(transport: asyncio.Transport) -> None:
    """Drop a connection and its unread bytes, megabytes that the kernel would otherwise keep for minutes."""
    connection = transport.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):  # closed meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    transport.abort()


def _expire(connection: Connection) -> None:
    """End the state whose deadline has passed, or the connection where that fails: others have deadlines too."""
    try:
        connection.expire()
    except MemoryError:
        raise
    except Exception:
        logger.exception("a late client could not be refused; its connection is dropped")
        connection.drop()


class Turns:
    """Calls that take long, such as beginning a request: in `period` turns of the event loop `most` of them are made.

    The others wait. Between two turns the event loop reads and accepts, so that what comes after a crowd does not wait
    for all of it. Clients take turns: a call of another client does not wait for those of a crowd.
    """

    def __init__(self, most: int, period: int) -> None:
        self._most = self._left = most
        self._period = period
        self._counting = False
        self._waiting: OrderedDict[str, OrderedDict[object, Callable[[], object]]] = OrderedDict()
        """By client."""
        self._client_of: dict[object, str] = {}

    def take(self, who: object, client: str, later: Callable[[], object]) -> bool:
        """Whether the call may be made now; else `later` is called when it may, unless `who` leaves."""
        if not self._counting:
            self._count(self._period)
        if self._left and not self._waiting:
            self._left -= 1
            return True
        self._client_of[who] = client
        self._waiting.setdefault(client, OrderedDict())[who] = later
        return False

    def leave(self, who: object) -> None:
        if (client := self._client_of.pop(who, None)) is not None:
            del self._waiting[client][who]
            if not self._waiting[client]:
                del self._waiting[client]

    def _count(self, turns: int) -> None:
        self._counting = False  # without memory for the next line, the next call begins to count again
        asyncio.get_running_loop().call_soon(self._count_down, turns)
        self._counting = True

    def _count_down(self, turns: int) -> None:
        if turns > 1:
            self._count(turns - 1)
            return
        self._left, self._counting = self._most, False
        if self._waiting:
            self._count(self._period)  # first: a call that fails stops no other
        while self._left and self._waiting:
            self._left -= 1
            self._next()()

    def _next(self) -> Callable[[], object]:
        """Take the next call out of those that wait."""
        client, waiting = next(iter(self._waiting.items()))
        who, later = waiting.popitem(last=False)
        del self._client_of[who]
        if waiting:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        return later


class Connections:
    """All connections of a server and what they share."""

    def __init__(self, context: ServerContext) -> None:
        self.context = context
        self.options = context.options
        self.most = self.options.max_connections
        self.busy: set[Connection] = set()
        self.idle: dict[Connection, None] = {}
        """Idle connections, oldest first; their deadlines are in the same order."""
        self._spare: dict[Connection, None] = {}
        self._logged: dict[int, float] = {}
        self._next_check = inf
        self._stood_still = 0.0
        self._openings = Turns(1, _TURNS_BETWEEN)
        self._begins = Turns(_BEGUN, 1)

    def now(self) -> float:
        """The time for deadlines: the event loop's clock, without the time in which the server did not run.

        A stopped or starved server reads nothing, so no client may be late because of it. From the next check on the
        clock stands still until the check has come.
        """
        return min(asyncio.get_running_loop().time() - self._stood_still, self._next_check)

    def reserve_descriptors(self) -> None:
        """Raise the process's limit of file descriptors, or lower that of connections to it."""
        needed = self.most + _SPARE + _RESERVED_DESCRIPTORS
        soft = raise_limit(needed)
        if soft < needed:
            self.most = max(1, soft - _SPARE - _RESERVED_DESCRIPTORS, soft // 4)
            logger.warning(
                "max_connections=%d is lowered to %d: the process may have %d file descriptors (ulimit -Hn), and %d "
                "are kept for engine processes and health checks",
                self.options.max_connections,
                self.most,
                soft,
                soft - self.most,
            )

    def enter(self, connection: Connection) -> None:
        """Take a new connection: within the limit, in the place of an idle one, or for health checks only."""
        self.busy.add(connection)
        if self._regular() > self.most:
            if (idle := self._longest_idle()) is not None:
                idle.drop()
            else:
                self._spare[connection] = None
                if len(self._spare) > _SPARE:
                    next(iter(self._spare)).drop()
        self.rest(connection)

    def rest(self, connection: Connection) -> None:
        """Note that a connection is without a request from now on."""
        if connection not in self._spare:
            self.busy.discard(connection)
            self.idle[connection] = None

    def start(self, connection: Connection) -> None:
        """Note that a connection is busy with a request from now on."""
        self.idle.pop(connection, None)
        self.busy.add(connection)

    def _longest_idle(self) -> Connection | None:
        """The connection that has been idle longest. One with an unread request is not idle."""
        while self.idle:
            connection = next(iter(self.idle))
            if not connection.has_unread():
                return connection
            self.start(connection)
        return None

    def _regular(self) -> int:
        return len(self.busy) + len(self.idle) - len(self._spare)

    def leave(self, connection: Connection) -> None:
        self.busy.discard(connection)
        self.idle.pop(connection, None)
        self._spare.pop(connection, None)
        self._openings.leave(connection)

    def may_open(self, connection: Connection, client: str, later: Callable[[], None]) -> bool:
        """Whether a WebSocket may be opened now; else `later` is called when it may, unless the connection leaves.

        Opening one takes as long as accepting several connections, and the event loop accepts one in a turn. So a
        connection that comes after those of a crowd is accepted before most of the crowd's WebSockets are open.
        """
        return self._openings.take(connection, client, later)

    def begin(self, request: Callable[[], object]) -> None:
        """Begin a request now, or in a later turn of the event loop if many have begun in this one.

        Between two turns the event loop reads what engines have generated. So the first of 256 requests that come
        together has its first token before the last one is tokenised and admitted.
        """
        if self._begins.take(request, "", request):
            request()

    def admit(self, connection: Connection, path: bytes) -> None:
        """Raise HttpRefusal if the connection is one too many and the path is no health check."""
        if connection in self._spare and path not in _HEALTH:
            if self._regular() >= self.most:
                raise HttpRefusal(503, f"max_connections={self.most} connections are open, and none of them is idle")
            del self._spare[connection]

    def note(self, refusal: HttpRefusal) -> None:
        """Count a refusal, and log one of each kind in a while."""
        self.context.counts.response(refusal.status)
        now = asyncio.get_running_loop().time()
        if now - self._logged.get(refusal.status, -inf) > _QUIET_SECONDS:
            self._logged[refusal.status] = now
            logger.warning("a request is refused with %d: %s (not logged again for a while)", refusal.status, refusal)

    async def watch(self) -> None:
        """Enforce deadlines."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._next_check = self.now() + _CHECK_SECONDS
                await asyncio.sleep(_CHECK_SECONDS)
                self._stood_still += max(0.0, loop.time() - self._stood_still - self._next_check)
                if self._late():
                    # A timer may run before the bytes are read that came in time.
                    await read_what_has_come()
                    for connection in self._late():
                        _expire(connection)
            except MemoryError:
                # Expired connections are still in the sets. Without this loop they would stay there for ever.
                await asyncio.sleep(0)

    def _late(self) -> list[Connection]:
        """The connections whose deadline has passed."""
        now = self.now()
        busy = [connection for connection in self.busy if connection.deadline <= now]
        return [*busy, *takewhile(lambda connection: connection.deadline <= now, self.idle)]
