"""An HTTP/1.1 client for many streams that costs little: asyncio's transports, httptools' parser, nothing per token.

Beside a server on the same machine a client that costs as much as the server measures itself. Nothing is retried: a
request that fails is a failure of the server.
"""

import asyncio
import re
import ssl
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit
from weakref import WeakSet

import httptools
import msgspec
import orjson

from djl_trtllm.errors import BenchmarkError

_ERROR_LENGTH = 300


class Counted(Enum):
    """Sources of the number of tokens; the later ones are less exact."""

    EACH = "token by token"
    USAGE = "usage in each event"
    TOTAL = "usage at the end, spread over the events"
    REQUESTED = "the requested length, spread over the events"
    EVENTS = "events, because the server reports no number of tokens"


class Stream:
    """A request and its response. Times are those of one clock, in seconds; `intended` is the time at which it should
    be sent."""

    __slots__ = (
        "accepted",
        "arrived",
        "counted",
        "counts",
        "detail",
        "ended",
        "error",
        "intended",
        "prompt_tokens",
        "requested",
        "sent",
        "times",
        "tokens",
        "warning",
    )

    def __init__(self, intended: float, requested: int = 0) -> None:
        self.intended = self.sent = intended
        self.requested = requested
        self.ended: float | None = None
        self.error: str | None = None
        self.detail = ""
        self.counted = Counted.EVENTS
        self.prompt_tokens: int | None = None
        self.accepted: int | None = None
        """Tokens that a draft proposed; None where the server does not say so."""
        self.warning = ""
        """The text of the response's `Warning`: of a parameter that the server ignores, for example."""
        self.tokens = 0
        self.times = array("d")
        self.counts = array("L")

    def add(self, now: float, tokens: int) -> None:
        """Note that this number of tokens has arrived."""
        self.times.append(now)
        self.counts.append(tokens)
        self.tokens += tokens

    def settle(self, total: int, counted: Counted) -> None:
        """Set the number of tokens to `total`: missing or surplus tokens are spread evenly over the events."""
        self.counted = counted
        if not self.times or total == self.tokens:
            return
        before, seen, given = self.tokens, 0, 0
        for index, count in enumerate(self.counts):
            seen += count
            upto = round(total * seen / before)
            self.counts[index] = upto - given
            given = upto
        self.tokens = total


class Reader:
    """Reads the body of a response in pieces as they arrive. This one keeps the text of an error."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.body = b""

    def feed(self, data: bytes, now: float) -> None:
        self.body = (self.body + data)[: 1 << 20]

    def end(self) -> None:
        """Take note that the body is complete."""


class _Lines(Reader, ABC):
    """A body of lines, which are read when they are complete."""

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._now = 0.0

    def feed(self, data: bytes, now: float) -> None:
        self._now = now
        data = self.body + data
        cut = data.rfind(b"\n") + 1
        self.body = data[cut:]
        if cut:
            self.read(data[:cut], now)

    @abstractmethod
    def read(self, lines: bytes, now: float) -> None:
        """Count the tokens of complete lines, and of the last one at the end."""

    def settle(self) -> None:
        """Settle the number of tokens after the last line."""

    @abstractmethod
    def whole(self) -> bool:
        """Return whether the response says that nothing is missing."""

    def end(self) -> None:
        stream = self.stream
        if self.body:
            self.read(self.body, self._now)
        self.settle()
        if stream.error is None and not stream.tokens:
            stream.error, stream.detail = "a response without tokens", _text(self.body)
        elif stream.error is None and not self.whole():
            # Bodies without a length end with their connection, and proxies end those of servers that are gone.
            stream.error = "the response ended before its last token"


_TOKEN = b'"token":'
_WHOLE_TEXT = re.compile(rb'"generated_text":\s*(?!null|\s)')


class TokenReader(_Lines):
    """LMI's `jsonlines` and TGI's events: a line for each token. Quotes inside texts are escaped in JSON.

    The last line also has the whole text.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._last = b""

    def read(self, lines: bytes, now: float) -> None:
        count = lines.count(_TOKEN)
        if b'"error' in lines:
            # Its line has the form of a token, but none was generated.
            count -= self._errors(lines)
        if count > 0:
            self.stream.counted = Counted.EACH
            self.stream.add(now, count)
            self._last = lines

    def whole(self) -> bool:
        return _WHOLE_TEXT.search(self._last) is not None

    def _errors(self, lines: bytes) -> int:
        """Note the first line with an error. Returns how many of those lines look like tokens."""
        found = 0
        for line in lines.splitlines():
            event = _object(line)
            text = event.get("error_msg") or event.get("error")
            if text is None and isinstance(event.get("token"), dict):
                text = event["token"].get("error_msg")
            if text is not None:
                found += "token" in event
                self.stream.error = self.stream.error or _in_stream(text)
        return found


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    accepted_prediction_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    text_output: str | None = None


_END = b"[DONE]"
_decode = msgspec.json.Decoder(_Event).decode


class EventReader(_Lines):
    """OpenAI's events, also as LMI's lines without `data:`, and those of Triton's `generate_stream`.

    Triton's have no sign of the last one.
    """

    def __init__(self, stream: Stream) -> None:
        super().__init__(stream)
        self._usages = 0
        self._total: int | None = None
        self._choices = self._ended = False

    def read(self, lines: bytes, now: float) -> None:
        stream, count = self.stream, 0
        for line in lines.splitlines():
            line = line.removeprefix(b"data:").lstrip()
            if not line.startswith(b"{"):
                self._ended = self._ended or line == _END
                continue  # other fields of events, blank lines
            try:
                event = _decode(line)
            except msgspec.MsgspecError:
                stream.error = stream.error or f"an event that is not understood: {_text(line)}"
                continue
            if event.error is not None:
                stream.error = stream.error or _in_stream(event.error)
            if event.choices:
                self._choices = True
                self._ended = self._ended or any(choice.finish_reason for choice in event.choices)
            if event.usage is not None:
                stream.prompt_tokens = event.usage.prompt_tokens or stream.prompt_tokens
                if event.usage.completion_tokens_details is not None:
                    stream.accepted = event.usage.completion_tokens_details.accepted_prediction_tokens
            if event.usage is not None and event.usage.completion_tokens:
                count += self._by_usage(event.usage.completion_tokens, count)
            elif _has_text(event):
                count += 1
        if count > 0:
            stream.add(now, count)

    def _by_usage(self, total: int, pending: int) -> int:
        """Return the tokens that are new by an event's usage, or 0 where only the last event has one."""
        self._usages += 1
        self._total = total
        known = self.stream.tokens + pending
        # Events before the first usage were counted as they came: this is the usage at the end.
        if self._usages == 1 and known:
            self._usages -= 1
            return 0
        return max(0, total - known)

    def whole(self) -> bool:
        return self._ended or not self._choices

    def settle(self) -> None:
        stream = self.stream
        if self._total is not None:
            stream.settle(self._total, Counted.USAGE if self._usages else Counted.TOTAL)
            if stream.counted is Counted.TOTAL and len(stream.counts) == sum(stream.counts):
                stream.counted = Counted.EACH
        elif stream.requested:
            stream.settle(stream.requested, Counted.REQUESTED)


def _has_text(event: _Event) -> bool:
    if event.text_output:
        return True
    for choice in event.choices:
        delta = choice.delta
        if choice.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)):
            return True
    return False


def _object(line: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(line.removeprefix(b"data:"))
    except orjson.JSONDecodeError:
        return {}
    return event if isinstance(event, dict) else {}


def _in_stream(text: object) -> str:
    if isinstance(text, dict):
        text = text.get("message", text)
    return f"error in the stream: {str(text)[:_ERROR_LENGTH]}"


def _text(data: bytes) -> str:
    return data[:_ERROR_LENGTH].decode(errors="replace")


clock = time.perf_counter
_MOST_IDLE = 2.0
"""Seconds after which a connection is not used again: the server may be about to close it."""
_PATH = "/%:@!$&'()*+,;=~"
_DETAIL = 500
"""Bytes of an error's body that are kept."""


class Target(NamedTuple):
    """The server that requests go to."""

    host: str
    port: int
    prefix: str = ""
    tls: ssl.SSLContext | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str, headers: Mapping[str, str], ca: str | None = None) -> "Target":
        """Parse an address. Raises BenchmarkError for an address or a header that cannot be sent."""
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
        self._reader: Reader | None = None
        self._pieces: list[bytes] = []

    def exchange(self, request: bytes, reader: Reader) -> asyncio.Future[str | None]:
        """Send a request. The future has the end: None, or what went wrong."""
        self._done: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
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
        if not self._done.done():
            self._done.set_result(error)

    # -- httptools' callbacks ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._framed = self._framed or name in (b"content-length", b"transfer-encoding")
        if name == b"warning" and self._reader is not None:
            stream, text = self._reader.stream, _text(value)
            # 299 AGENT "TEXT"
            stream.warning = "; ".join(filter(None, (stream.warning, text.partition('"')[2].rstrip('"') or text)))

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
        self._open: WeakSet[Connection] = WeakSet()

    async def send(self, request: bytes, reader: Reader) -> int:
        """Send a request and read its response. `reader.stream` gets the end and the error.

        Returns the status; 0: there was none.
        """
        stream, connection = reader.stream, None
        try:
            connection = await self._connected()
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
        return status

    def close(self) -> None:
        for connection in self._open:
            connection.close()

    async def _connected(self) -> Connection:
        # asyncio.wait_for of Python 3.10 and 3.11 loses a cancellation that comes in the turn in which its task ends.
        connecting = asyncio.ensure_future(self._connection())
        try:
            if not (await asyncio.wait({connecting}, timeout=self._timeout))[0]:
                raise asyncio.TimeoutError
            return connecting.result()
        finally:
            connecting.cancel()

    async def _connection(self) -> Connection:
        now = clock()
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and now - connection.idle_since < _MOST_IDLE:
                return connection
            connection.close()
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
    """Send a small request and return its end: status (0: none), body, error."""
    reader = Reader(Stream(clock()))
    status = await client.send(client.target.request(path, body), reader)
    return status, reader.body, reader.stream.error
