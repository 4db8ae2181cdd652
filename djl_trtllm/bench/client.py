"""An HTTP/1.1 client for many streams that costs little: asyncio's transports, httptools' parser, nothing per token.

Beside a server on the same machine a client that costs as much as the server measures itself. Nothing is retried: a
request that fails is a failure of the server.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Mapping
from typing import NamedTuple, cast
from urllib.parse import quote, urlsplit

import httptools

from djl_trtllm.bench.streams import Reader, Stream
from djl_trtllm.errors import BenchmarkError

clock = time.perf_counter
_MOST_IDLE = 2.0
"""Seconds after which a connection is not used again: the server may be about to close it."""
_PATH = "/%:@!$&'()*+,;=~"
_DETAIL = 500
"""Bytes of an error's body that are kept."""


class Target(NamedTuple):
    """Where requests go."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str], ca: str | None = None) -> Target:
        """Raises BenchmarkError for an address or a header that cannot be sent."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise BenchmarkError(f"URL {url}: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise BenchmarkError(f"URL {url}: expected http://HOST[:PORT][/PATH] or https://...")
        if parts.username is not None:
            raise BenchmarkError(
                f"URL of {parts.hostname}: it has a user; give --api-key or --header 'Authorization: ...'"
            )
        if parts.path != quote(parts.path, safe=_PATH):
            raise BenchmarkError(f"URL {url}: write {quote(parts.path, safe=_PATH)} for its path")
        for name, value in headers.items():
            if not f"{name}{value}".isprintable() or not name or not value.isascii() or set(name) & set(": "):
                raise BenchmarkError(f"header {name!r}: expected 'NAME: VALUE' in printable ASCII")
        if ca is not None and parts.scheme != "https":
            raise BenchmarkError(f"--ca {ca}: URL {url} does not use TLS; expected https://...")
        try:
            tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        except (OSError, ssl.SSLError) as error:
            raise BenchmarkError(f"--ca {ca}: cannot read certificates: {error}") from None
        return cls(parts.hostname, port, parts.path.rstrip("/"), tls, tuple(headers.items()))

    def path(self, path: str) -> str:
        """The address of an API's path. A prefix that ends as the path begins is the same part (`/v1`)."""
        first = "/" + path.split("/")[1]
        if self.prefix.endswith(path):
            return self.prefix
        return self.prefix + (path.removeprefix(first) if self.prefix.endswith(first) else path)

    def request(self, path: str, body: bytes | None) -> bytes:
        """A request as bytes: POST with a body, GET without."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        fields = {"Host": f"{host}:{self.port}", "User-Agent": "djl-trtllm-bench", "Accept": "*/*"}
        if body is not None:
            fields |= {"Content-Type": "application/json", "Content-Length": str(len(body))}
        fields |= dict(self.headers)
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        return f"{'GET' if body is None else 'POST'} {self.path(path)} HTTP/1.1\r\n{head}\r\n".encode() + (body or b"")


class Connection(asyncio.Protocol):
    """A connection, which carries one request at a time."""

    def __init__(self) -> None:
        self.closed = False
        self.status = 0
        self.idle_since = 0.0
        self._transport: asyncio.WriteTransport | None = None
        self._reader: Reader | None = None
        self._done: asyncio.Future[str | None] | None = None
        self._pieces: list[bytes] = []
        self._framed = self._headed = self._complete = self._keeps = False

    def exchange(self, request: bytes, reader: Reader) -> asyncio.Future[str | None]:
        """Send a request. The future has the end: None, or what went wrong."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._reader = reader
        self._framed = self._headed = self._complete = False
        self.status = 0
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        return self._done

    def fail(self, error: str) -> None:
        """End the request with an error."""
        self._end(error)
        self.close()

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's protocol --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        now = clock()
        if self._reader is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(f"not HTTP: {error}")
            return
        if self._pieces:
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            if self.status == 200:
                self._reader.feed(body, now)
            else:
                Reader.feed(self._reader, body, now)
        if self._complete:
            if not self._keeps:
                self.close()
            self._end(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._reader is not None:
            whole = self._headed and not self._framed and error is None
            self._end(None if whole else "connection closed during the response")

    def _end(self, error: str | None) -> None:
        self._reader = None
        self.idle_since = clock()
        if self._done is not None and not self._done.done():
            self._done.set_result(error)

    # -- httptools' callbacks ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._headed = self.status >= 200

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = self._headed
        self._keeps = self._parser.should_keep_alive()  # its parser forgets that afterwards


class Client:
    """Connections to one target, which are used again while they are fresh."""

    def __init__(self, target: Target, timeout: float) -> None:
        self.target = target
        self._timeout = timeout
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()

    async def send(self, request: bytes, reader: Reader) -> int:
        """Send a request and read its response. `reader.stream` gets the end and the error.

        Returns the status; 0: there was none.
        """
        stream, connection = reader.stream, None
        try:
            connection = await asyncio.wait_for(self._connection(), self._timeout)
            stream.sent = clock()
            done = connection.exchange(request, reader)
            late = f"no end within {self._timeout:g} s"
            timer = asyncio.get_running_loop().call_later(self._timeout, connection.fail, late)
            try:
                problem = await done
            finally:
                timer.cancel()
        except (OSError, asyncio.TimeoutError) as error:
            problem = _failed(error)
        except asyncio.CancelledError:
            if connection is not None:
                connection.close()
            raise
        status = connection.status if connection is not None else 0
        self._settle(reader, status, problem)
        if connection is not None and not connection.closed:
            self._idle.append(connection)
        elif connection is not None:
            self._open.discard(connection)
        return status

    def close(self) -> None:
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()

    async def _connection(self) -> Connection:
        now = clock()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since < _MOST_IDLE:
                return connection
            connection.close()
            self._open.discard(connection)
        target = self.target
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, target.host, target.port, ssl=target.tls
        )
        self._open.add(connection)
        return connection

    def _settle(self, reader: Reader, status: int, problem: str | None) -> None:
        stream = reader.stream
        if problem is not None:
            stream.error = stream.error or problem
        elif status != 200:
            stream.error = f"HTTP {status}"
            stream.detail = reader.body[:_DETAIL].decode(errors="replace")
        else:
            reader.end()
        stream.ended = clock()


def _failed(error: BaseException) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, asyncio.TimeoutError):
        return "no connection within the timeout"
    return f"no connection: {error}"


async def fetch(client: Client, path: str, body: bytes | None = None) -> tuple[int, bytes, str | None]:
    """A small request to its end: status (0: none), body, error."""
    reader = Reader(Stream(clock()))
    status = await client.send(client.target.request(path, body), reader)
    return status, reader.body, reader.stream.error
