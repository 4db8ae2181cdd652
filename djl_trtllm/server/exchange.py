"""One HTTP request and its response: the layer between ASGI and the routes, and the way of requests that generate.

A task per stream that wakes up for every token would be the largest cost of a streaming server. Instead the rolling
batch calls `ResponseWriter.deliver`, which gives the bytes to the transport at once, in the same turn of the event
loop for all streams. Nothing of the request is on a stack meanwhile, if the server calls when the client is gone.
"""

import asyncio
import logging
from asyncio import Future
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from types import coroutine
from typing import Any, Protocol, TypeAlias, TypeVar, cast
from urllib.parse import parse_qs

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from djl_trtllm import errors
from djl_trtllm.api.base import SMALL, Call, Dialect, RawRequest, Reply
from djl_trtllm.api.front_end import endpoint_error, front_end_error, returned_attributes, with_attributes
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.errors import AuthenticationError, RequestError, RequestTooLargeError
from djl_trtllm.logs import of_request
from djl_trtllm.request import OutputChunk, joined
from djl_trtllm.server.access import ApiKey
from djl_trtllm.server.context import ServerContext, find_model
from djl_trtllm.service.clients import Caller, Session, Sessions, label
from djl_trtllm.service.lifecycle import ModelService, State, parse_call, run_by_size, shutting_down
from djl_trtllm.telemetry.reports import CLIENT_LEFT, ServedRequest

Headers: TypeAlias = Iterable[tuple[str, str]]
T = TypeVar("T")

# What the scope of a request has in our server, beside what ASGI knows. Keys of their own: dicts of extensions, as ASGI
# has them, would be hundreds of bytes for each request.

CONNECTION = "djl_trtllm.connection"
"""The key of the `ServerConnection` in a scope."""

REST = "djl_trtllm.rest"
"""The key of a function that takes a future, done when the response has ended, from an application that returns before.

The stack of the application, a coroutine in each layer, is gone while the response goes on.
"""

WRITE_PART = "djl_trtllm.write_part"
"""The key of `ServerConnection.write_part` where another server has the connection (`cluster.application`)."""

REFUSED = "djl_trtllm.refused"
"""The key of the status with which the server has refused a request before it had read the whole body."""

_MOST_DIGITS = 20
_ALWAYS = ((b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff"))


class ServerConnection(Protocol):
    """The connection of a request, with what our server can do beyond ASGI."""

    def reset(self) -> None:
        """Drop the connection at once. A normal close would wait until the client reads."""

    def write_part(self, part: bytes) -> bool:
        """Send a part of a body of unknown length, after its head, without an ASGI message or a coroutine.

        False if it was not sent: the client does not read, or is gone.
        """

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this if the client leaves before the response has ended; at once, if it has left."""


class Refused(Exception):
    """The exception with the reply to a refused request of the management API."""

    def __init__(self, reply: Reply) -> None:
        super().__init__()
        self.reply = reply


def refused(status: int, message: str, djl_type: str | None = None, *, allow: str | None = None) -> Refused:
    """The refusal in the format of DJL's front end; `allow` lists the methods that the path takes."""
    headers = () if allow is None else (("Allow", allow),)
    return Refused(front_end_error(status, message, djl_type, headers=headers))


class ClientGone(Exception):
    """The client disconnected while its request was being read."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request and its response. `dialect` is the format of errors."""

    scope: Scope
    receive: Receive
    send: Send
    """The ASGI server's `send`, for bodies; `begin` sends status and headers."""
    context: ServerContext
    dialect: Dialect = DEFAULT
    route: str = ""
    """The path of the route, with its placeholders; empty if none matches."""
    model: str = ""
    """The model that generates, as soon as it is known."""
    key: ApiKey | None = None
    """The client's API key, if it needs one."""
    sent_head: bool = False
    caller: Caller | None = None
    """The client among whose requests it counts."""
    service: ModelService | None = None
    """The service that generates `served.generations`."""
    rest: Future[None] | None = None
    """Done when the response has ended, where it goes on after its handler."""
    _held: int = 0
    headers: Mapping[str, str] = field(init=False)
    """The headers as they were sent, by lower-case name: those that a gateway removes are not here."""
    properties: Mapping[str, str] = field(init=False)
    """The headers, and the custom attributes."""
    request_id: str = field(init=False)
    served: ServedRequest = field(init=False)

    def __post_init__(self) -> None:
        # The first of repeated headers is used.
        headers = reversed(self.scope["headers"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self.properties = with_attributes(self.headers)
        self.request_id = self.context.request_id(self.properties)
        method = self.scope["method"]
        self.served = ServedRequest(
            self.request_id, method, self.scope["path"], self.headers, reads=method in ("GET", "HEAD")
        )

    @property
    def query(self) -> dict[str, str]:
        if not self.scope["query_string"]:
            return {}
        pairs = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return {name: values[0] for name, values in pairs.items()}

    @property
    def address(self) -> str | None:
        """The client's address; None on a Unix socket."""
        client = self.scope.get("client")
        return None if client is None else client[0]

    @property
    def endpoint(self) -> str | None:
        """The SageMaker endpoint in the path; the client is then one of SageMaker's runtime."""
        endpoint: str | None = self.scope.get("path_params", {}).get("endpoint")
        return endpoint

    @property
    def model_name(self) -> str | None:
        """The model that the query or a header names, used if the path names none."""
        return self.query.get("model_name") or self.properties.get("model_name") or self.target_model

    @property
    def target_model(self) -> str | None:
        """The model of a SageMaker multi-model endpoint: its archive's name, or that without the ending."""
        return self.properties.get("x-amzn-sagemaker-target-model", "").removesuffix(".tar.gz") or None

    @property
    def content_length(self) -> int | None:
        """The length that the client declares for the body; None if it declares none."""
        declared = self.properties.get("content-length", "")
        # Python takes 4,300 digits for a number.
        return int(declared[:_MOST_DIGITS]) if declared.isdecimal() else None

    async def body(self) -> bytes:
        """The request body; it counts until `release`. Raises ClientGone, RequestTooLargeError and OverloadedError."""
        limit = self.context.options.max_request_size
        too_large = f"the request body is larger than max_request_size={limit} bytes"
        declared = self.content_length
        if declared is not None and declared > limit:
            raise RequestTooLargeError(too_large)
        parts = BytesIO()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.served.status = self.scope.get(REFUSED, CLIENT_LEFT)
                raise ClientGone
            part = message.get("body", b"")
            if self._held + len(part) > limit:
                raise RequestTooLargeError(too_large)
            if not self.context.bodies.take(self._held, len(part)):
                raise self.context.bodies.refusal()
            self._held += len(part)
            whole = not message.get("more_body", False)
            if whole and len(part) == self._held:
                return bytes(part)
            parts.write(part)
            if whole:
                return parts.getvalue()  # no copy of it

    async def small_body(self) -> bytes:
        """The request body of a route that reads it on the event loop, with a limit of its own."""
        body = await self.body()
        if len(body) > SMALL:
            raise RequestTooLargeError(f"the request body has {len(body)} bytes: {self.route} takes at most {SMALL}")
        return body

    def go_on(self, rest: Future[None]) -> None:
        """Let the response go on after its handler, until `rest` is done, and drop what only the handler needs."""
        self.rest = rest
        self.headers = self.properties = {}
        if not self.context.telemetry.exports:
            self.served.headers = self.headers

    def end(self) -> None:
        """End the request's generation and report it; nothing more is sent."""
        if self.service is not None:
            # The client may be gone, or its response have ended before its tokens did.
            self.service.cancel(self.served.generations)
        if self.caller is not None:
            self.caller.leave()
        elif not self.served.quiet and not self.served.client:
            key = None if self.key is None else self.key.name
            self.served.client = label(self.context.clients.client(key, self.headers, self.address))
        self.release()
        self.context.telemetry.ended(self.served)

    def release(self) -> None:
        """Give back the memory of the body."""
        if self._held:
            self.context.bodies.release(self._held)
            self._held = 0

    async def begin(self, status: int, content_type: str, length: int | None, more: Headers = ()) -> None:
        """Send status and headers; without `length` the body is chunked."""
        fields = [
            (b"content-type", content_type.encode("latin-1")),
            (self.context.id_header, self.request_id.encode("latin-1")),
        ]
        for name, value in more:
            fields.append((name.lower().encode("latin-1"), value.encode("latin-1")))
        if length is not None:
            fields.append((b"content-length", b"%d" % length))
        self.sent_head = True
        self.served.status = status
        self.context.counts.response(status, self.route, self.model)
        await self.send({"type": "http.response.start", "status": status, "headers": [*fields, *_ALWAYS]})

    async def reply(self, reply: Reply) -> None:
        await self.begin(reply.status, reply.content_type, len(reply.body), reply.headers)
        await self.send({"type": "http.response.body", "body": reply.body})

    async def fail(self, error: Exception, more: tuple[tuple[str, str], ...] = ()) -> None:
        """Send an error, with additional headers. Call it only while nothing has been sent."""
        self.served.error = type(error).__name__
        reply = self.dialect.encode_error(error, self.context.options)
        if self.endpoint is not None and self.dialect.sagemaker:
            reply = endpoint_error(error, reply)
        if isinstance(error, AuthenticationError):
            more += (("WWW-Authenticate", "Bearer"),)
        await self.reply(reply._replace(headers=(*reply.headers, *more)))

    async def disconnected(self) -> None:
        """Return when the client has left."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    @property
    def connection(self) -> ServerConnection | None:
        """The connection; None if the ASGI server is not ours."""
        connection: ServerConnection | None = self.scope.get(CONNECTION)
        return connection

    def abort(self) -> None:
        """Drop the connection and what its client has not read yet, where the server can do so."""
        if self.connection is not None:
            self.connection.reset()


logger = logging.getLogger(__name__)


@coroutine
def _rest(step: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """Continue a coroutine that already ran up to where it awaits `waits_for`."""
    while True:
        try:
            value = yield waits_for
        except BaseException as error:
            proceed = partial(step.throw, error)
        else:
            proceed = partial(step.send, value)
        try:
            waits_for = proceed()
        except StopIteration as end:
            result: T = end.value
            return result


async def _continued(step: Coroutine[Any, Any, T], waits_for: Any) -> T:
    return await _rest(step, waits_for)


def start_now(step: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T] | None:
    """Run a coroutine up to its first real wait. Returns None if it ended, otherwise the rest of it, to be awaited.

    `asyncio.eager_task_factory` does this from Python 3.12 on; this needs no task for coroutines that never wait.
    """
    try:
        waits_for = step.send(None)
    except StopIteration:
        return None
    return _continued(step, waits_for)


_RESEEDED = "the engine was replaced meanwhile: another run with this seed gives other tokens"


class ResponseWriter:
    """Encodes the output chunks of one call into ASGI messages.

    While the client does not read, chunks are kept and sent together when it reads again; after `stream_write_timeout`
    seconds the client is dropped.
    """

    def __init__(self, call: Call, exchange: Exchange) -> None:
        self._encoder = call.encoder
        self._headers = call.headers
        self._late_headers = call.late_headers
        self._exchange = exchange
        self._unfinished = call.sequences
        self._connection = exchange.connection
        own = None if self._connection is None else self._connection.write_part
        self._write_part: Callable[[bytes], bool] | None = exchange.scope.get(WRITE_PART, own)
        self._write_timeout = exchange.context.options.stream_write_timeout
        self._blocked: asyncio.Task[None] | None = None
        self._listening: asyncio.Task[None] | None = None
        self._kept: list[OutputChunk] = []
        self._complete = False
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # -- for the rolling batch -------------------------------------------------------------------------------------

    def deliver(self, chunk: OutputChunk) -> None:
        """Send a chunk, or keep it while the client does not read."""
        if self._blocked is not None:
            self._kept.append(chunk)
        elif not self._closed.done():
            self._send_encoded([chunk])

    # -- for the request's handler ---------------------------------------------------------------------------------

    def until_closed(self) -> asyncio.Future[None]:
        """Return a future that is done when the response is sent, or its client has left or does not read."""
        self._closed.add_done_callback(self._end)
        if self._connection is None:
            self._listening = asyncio.ensure_future(self._disconnected())
        elif not self._closed.done():  # else the connection would keep it until its next response
            self._connection.when_lost(self._close)
        return self._closed

    def _end(self, _: asyncio.Future[None]) -> None:
        for task in (self._listening, self._blocked):
            if task is not None:
                task.cancel()
        self._exchange.end()

    async def _disconnected(self) -> None:
        try:
            await self._exchange.disconnected()
        finally:
            self._close()

    def _send_encoded(self, chunks: list[OutputChunk]) -> None:
        try:
            data = self._encode(chunks[0]) if len(chunks) == 1 else b"".join([self._encode(chunk) for chunk in chunks])
        except Exception as error:
            self._break_off(error)
            return
        if not self._complete:
            write_part = self._write_part
            if not data or (write_part is not None and self._exchange.sent_head and write_part(data)):
                return
        self._run(self._body(data))

    def _encode(self, chunk: OutputChunk) -> bytes:
        finished = chunk.finished
        if finished is not None:
            self._unfinished -= 1
            self._complete = not self._unfinished
            if finished.error is not None and not self._exchange.sent_head:
                raise finished.error
            if finished.reseeded:
                return self._say_reseeded() + self._encoder.encode(chunk)
        return self._encoder.encode(chunk)

    def _say_reseeded(self) -> bytes:
        """Say in a header that the output was reseeded, or in a comment of a stream that has begun."""
        if not self._exchange.sent_head:
            self._headers = (*self._headers, ("Warning", f'299 djl-trtllm "{_RESEEDED}"'))
        elif self._encoder.content_type.startswith("text/event-stream"):
            return f": {_RESEEDED}\n\n".encode()
        return b""

    def _break_off(self, error: Exception) -> None:
        """End a response that cannot continue. What the engine still generates for it is discarded."""
        if not isinstance(error, RequestError):
            logger.error("encoding the response failed", exc_info=error, extra=self._belonging)
        self._complete = True
        self._exchange.served.error = type(error).__name__
        if not self._exchange.sent_head:
            self._run(self._exchange.fail(error))
        elif isinstance(error, RequestError) and (last := self._encoder.error(error)):
            self._run(self._body(last))
        else:
            # The format cannot express it: a body without an end shows the client that the response is incomplete.
            self._close()

    def _body(self, data: bytes) -> Coroutine[Any, Any, None]:
        exchange = self._exchange
        message = {"type": "http.response.body", "body": data, "more_body": not self._complete}
        if exchange.sent_head:
            return cast(Coroutine[Any, Any, None], exchange.send(message))
        return self._first(message, len(data) if self._complete else None)

    async def _first(self, message: dict[str, Any], length: int | None) -> None:
        await self._exchange.begin(200, self._encoder.content_type, length, (*self._headers, *self._late_headers()))
        await self._exchange.send(message)

    def _run(self, messages: Coroutine[Any, Any, None]) -> None:
        try:
            rest = start_now(messages)
        except OSError as error:
            self._lose(error)
            return
        if rest is not None:
            self._blocked = asyncio.ensure_future(self._wait_for_reader(rest))
        elif self._complete:
            self._close()

    async def _wait_for_reader(self, rest: Coroutine[Any, Any, None]) -> None:
        """Wait for a client that does not read, then send at once what was generated meanwhile."""
        try:
            await asyncio.wait_for(rest, self._write_timeout)
        except asyncio.TimeoutError:
            logger.warning(
                "the client did not read for %g seconds (option.stream_write_timeout) and is dropped",
                self._write_timeout,
                extra=self._belonging,
            )
            self._exchange.abort()
            self._close()
            return
        except OSError as error:
            self._lose(error)
            return
        self._blocked = None
        kept, self._kept = self._kept, []
        if self._complete:
            self._close()
        elif kept:
            self._send_encoded(joined(kept) if self._encoder.repeats else kept)

    def _lose(self, error: OSError) -> None:
        logger.info("the client is gone: %s", error, extra=self._belonging)
        self._close()

    @property
    def _belonging(self) -> dict[str, str]:
        """The `extra` of a log line of this request: the rolling batch calls for many requests."""
        return of_request(self._exchange.request_id)

    def _close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)


# -- requests that generate --------------------------------------------------------------------------------------------


@dataclass
class Generation:
    """Answers the requests of dialects' paths that generate."""

    context: ServerContext
    sessions: "SessionRequests"

    async def answer(self, dialect: Dialect, path: str, exchange: Exchange) -> None:
        """Find the model, read the body, let the dialect parse it and the service run it."""
        exchange.served.dialect = dialect.name
        key = None if exchange.key is None else exchange.key.name
        caller = self.context.clients.caller(key, exchange.headers, exchange.address)
        exchange.served.client = caller.label
        caller.enter()
        exchange.caller = caller
        await self._generate(dialect, path, exchange, caller)

    async def _generate(self, dialect: Dialect, path: str, exchange: Exchange, caller: Caller) -> None:
        served = exchange.served
        request: RawRequest | None = None
        name = exchange.scope["path_params"].get("model") or exchange.model_name
        if name is None and dialect.names_model:
            request = await read_request(exchange, path)
            name = await name_in(dialect, request)
        served.model = errors.clipped(name or "")
        model = find_model(self.context.registry, dialect, name, exchange.endpoint)
        served.model = exchange.model = model.name
        if model.state is State.DRAINING:
            # Keep-alive clients have to open a connection to another server.
            await exchange.fail(shutting_down(model.name), (("Connection", "close"),))
            return
        request = request or await read_request(exchange, path)
        use, loaded = SessionUse(request), model.model
        if dialect.sagemaker:
            use = await self.sessions.use(request, caller.client, custom=loaded.custom is not None)
            if use.reply is not None:
                await exchange.reply(use.reply)
                return
        try:
            call = await parse_call(dialect, use.request, loaded)
        except Exception:
            await self.sessions.undo(use)
            raise
        service = model.pick(use.session and use.session.worker)
        if use.session is not None:
            use.session.worker = service
        headers = (*use.headers, *returned_attributes(exchange.properties)) if dialect.sagemaker else ()
        origin = caller.origin(exchange.request_id, dialect.name)
        call = service.with_warnings(replace(call, headers=(*call.headers, *headers), origin=origin))
        # The parsed request is kept, not its bytes.
        del request, use
        exchange.release()
        writer = ResponseWriter(call, exchange)
        self.context.telemetry.began(served, call.requests)
        served.generations = await service.generate(call, writer.deliver)
        exchange.service = service
        exchange.go_on(writer.until_closed())


async def name_in(dialect: Dialect, request: RawRequest) -> str | None:
    """Return the model that a request names in its body."""
    return await run_by_size(len(request.body), lambda: dialect.model_name(request))


async def read_request(exchange: Exchange, path: str) -> RawRequest:
    return raw_request(exchange, path, await exchange.body())


def raw_request(exchange: Exchange, path: str, body: bytes = b"") -> RawRequest:
    key = "" if exchange.key is None else exchange.key.name
    return RawRequest(body, exchange.properties, path, exchange.scope["path_params"], exchange.query, key)


# -- stateful sessions, of SageMaker -----------------------------------------------------------------------------------

_SESSION = "x-amzn-sagemaker-session-id"
_NEW_SESSION = "X-Amzn-SageMaker-New-Session-Id"
_CLOSED_SESSION = "X-Amzn-SageMaker-Closed-Session-Id"
_NEW, _CLOSE = "NEW_SESSION", "CLOSE"
_TYPE = "requestType"
_TYPE_IN_JSON = _TYPE.encode()
_PATH = "session_path"
"""The property with the folder of the session, for the model's own formatters."""


class SessionUse(msgspec.Struct, frozen=True):
    """A request in its session. `headers` are for the response. `reply` is the response, if nothing is generated."""

    request: RawRequest
    session: Session | None = None
    headers: tuple[tuple[str, str], ...] = ()
    reply: Reply | None = None


class SessionRequests:
    """The sessions of requests; with `sessions` None, requests that name a session are refused."""

    def __init__(self, sessions: Sessions | None) -> None:
        self._sessions = sessions

    async def use(self, request: RawRequest, client: str = "", *, custom: bool = False) -> SessionUse:
        """Find, open or close the session of a client's request. `custom`: the model's own formatters read the body.

        Raises SessionError and OverloadedError.
        """
        identifier = request.properties.get(_SESSION, "").strip()
        kind = None if custom and self._sessions is None else _kind(request)
        if not identifier and kind is None:
            return SessionUse(request)
        if self._sessions is None:
            raise errors.SessionError(
                f"Invalid payload. stateful sessions not enabled, {_TYPE} and {_SESSION} are not supported: set "
                "option.enable_stateful_sessions=true (SAGEMAKER_ENABLE_STATEFUL_SESSIONS)"
            )
        if kind is None and identifier == _NEW and not request.body.strip():
            kind = _NEW
        if kind is not None and request.path.endswith("-response-stream"):
            raise errors.SessionError("a session is opened and closed by InvokeEndpoint, not by a response stream")
        if kind == _CLOSE:
            await asyncio.to_thread(self._sessions.close, identifier)
            return _replied(request, "closed", identifier, (_CLOSED_SESSION, identifier))
        if kind is None and identifier != _NEW:
            session = self._sessions.find(identifier)
            return SessionUse(_with_path(request, session), session)
        session = await asyncio.to_thread(self._sessions.create, client)
        header = (_NEW_SESSION, session.header)
        if kind == _NEW:
            return _replied(request, "created", session.id, header)
        return SessionUse(_with_path(request, session), session, (header,))

    async def undo(self, use: SessionUse) -> None:
        """Close the session that was opened for a request that is refused."""
        if use.headers and use.session is not None and self._sessions is not None:
            await asyncio.to_thread(self._sessions.close, use.session.id)


def _kind(request: RawRequest) -> str | None:
    """Return what the body asks about sessions; None if it does not. Such bodies are small. Raises SessionError."""
    if len(request.body) > SMALL or _TYPE_IN_JSON not in request.body:
        return None
    try:
        payload = request.json
    except errors.InvalidRequestError:
        return None
    if type(payload) is not dict or _TYPE not in payload:
        return None
    kind = payload[_TYPE]
    if kind not in (_NEW, _CLOSE) or len(payload) > 1:
        raise errors.SessionError(f'a request with {_TYPE} is {{"{_TYPE}": "{_NEW}"}} or {{"{_TYPE}": "{_CLOSE}"}}')
    return str(kind)


def _replied(request: RawRequest, what: str, identifier: str, header: tuple[str, str]) -> SessionUse:
    reply = Reply.json({"result": f"Session {identifier} {what}"})._replace(headers=(header,))
    return SessionUse(request, reply=reply)


def _with_path(request: RawRequest, session: Session) -> RawRequest:
    return replace(request, properties={**request.properties, _PATH: str(session.path)})
