"""One HTTP request and its response: the layer between ASGI and the routes."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import Protocol, TypeAlias
from urllib.parse import parse_qs

from starlette.datastructures import Headers as RequestHeaders
from starlette.types import Receive, Scope, Send

from djl_trtllm.api import Dialect, Reply
from djl_trtllm.api.endpoint_errors import endpoint_error
from djl_trtllm.api.headers import TARGET_MODEL, properties, request_id
from djl_trtllm.api.json_body import SMALL
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.errors import AuthenticationError, RequestTooLargeError
from djl_trtllm.server.access import ApiKey
from djl_trtllm.server.body_memory import BodyMemory
from djl_trtllm.server.metrics import ServerCounts
from djl_trtllm.service import ModelService
from djl_trtllm.service.clients import Caller
from djl_trtllm.telemetry import Telemetry
from djl_trtllm.telemetry.served_request import CLIENT_LEFT, ServedRequest

Headers: TypeAlias = Iterable[tuple[str, str]]

# What the scope of a request has in our server, beside what ASGI knows. Keys of their own: dicts of extensions, as ASGI
# has them, would be hundreds of bytes for each request.

CONNECTION = "djl_trtllm.connection"
"""The `ServerConnection`."""

REST = "djl_trtllm.rest"
"""Takes a future that is done when the response has ended, from an application that returns before. What it had on the
stack, a coroutine in each layer, is not there while the response goes on."""

REFUSED = "djl_trtllm.refused"
"""The status with which the server has refused a request whose body it does not read on."""

_MOST_DIGITS = 20
_ALWAYS = ((b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff"))


class ServerConnection(Protocol):
    """What the connection of a request can do in our server."""

    def reset(self) -> None:
        """Drop the connection. A normal close would wait for the client to read."""

    def write_part(self, part: bytes) -> bool:
        """Send a part of a body of unknown length, without a message or a coroutine for it, where the head is sent.

        False if it was not sent: the client does not read, or is gone.
        """

    def when_lost(self, call: Callable[[], None]) -> None:
        """Call this if the client leaves before the response has ended; at once, if it has left."""


class ClientGone(Exception):
    """The client disconnected while its request was read."""


@dataclass(slots=True, eq=False)
class Exchange:
    """One HTTP request and its response. `dialect` is the format of errors, `options` are the server's."""

    scope: Scope
    receive: Receive
    send: Send
    """The ASGI server's `send`, for bodies; `begin` sends status and headers."""
    options: Options
    counts: ServerCounts
    dialect: Dialect = DEFAULT
    bodies: BodyMemory = field(default_factory=BodyMemory)
    """The memory of all requests' bodies."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    route: str = ""
    """The path of the route, with its placeholders; empty if none matches."""
    model: str = ""
    """The model that generates, as soon as it is known."""
    key: ApiKey | None = None
    """The client's API key, if it needs one."""
    sent_head: bool = False
    caller: Caller | None = None
    """Whose request it is, where it counts among those of its client."""
    service: ModelService | None = None
    """What generates `served.generations`."""
    rest: Future[None] | None = None
    """Done when the response has ended, where it goes on after its handler."""
    _held: int = 0
    properties: dict[str, str] = field(init=False)
    """Headers by lower-case name, and custom attributes."""
    request_id: str = field(init=False)
    served: ServedRequest = field(init=False)

    def __post_init__(self) -> None:
        self.properties = properties(RequestHeaders(scope=self.scope).items())
        self.request_id = request_id(self.properties, self.options.request_id_header_key)
        method = self.scope["method"]
        self.served = ServedRequest(
            self.request_id, method, self.scope["path"], self.properties, reads=method in ("GET", "HEAD")
        )

    @property
    def query(self) -> dict[str, str]:
        pairs = parse_qs(self.scope["query_string"].decode("latin-1"), keep_blank_values=True)
        return {name: values[0] for name, values in pairs.items()}

    @property
    def address(self) -> str | None:
        """The client's address; None on a Unix socket."""
        client = self.scope.get("client")
        return None if client is None else client[0]

    @property
    def endpoint(self) -> str | None:
        """The endpoint that the path names: the client is that of SageMaker's runtime."""
        endpoint: str | None = self.scope.get("path_params", {}).get("endpoint")
        return endpoint

    @property
    def model_name(self) -> str | None:
        """The model that the query or a header names, used if the path names none."""
        return self.query.get("model_name") or self.properties.get("model_name") or self.target_model

    @property
    def target_model(self) -> str | None:
        """The model of a SageMaker multi-model endpoint: its archive's name, or that without the ending."""
        return self.properties.get(TARGET_MODEL, "").removesuffix(".tar.gz") or None

    @property
    def content_length(self) -> int | None:
        """The length that the client declares for the body; None if it declares none."""
        declared = self.properties.get("content-length", "")
        # Python takes 4,300 digits for a number.
        return int(declared[:_MOST_DIGITS]) if declared.isdecimal() else None

    async def body(self) -> bytes:
        """The request body; it counts until `release`. Raises ClientGone, RequestTooLargeError and OverloadedError."""
        limit = self.options.max_request_size
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
            if not self.bodies.take(self._held, len(part)):
                raise self.bodies.refusal()
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
        """The response goes on after its handler, until `rest` is done. What only the handler needs is not kept."""
        self.rest = rest
        self.properties = {}
        if not self.telemetry.reads_headers:
            self.served.headers = self.properties

    def end(self) -> None:
        """Nothing more is sent: end what is done for it, and report it."""
        if self.service is not None:
            # The client may be gone, or its response have ended before its tokens did.
            self.service.cancel(self.served.generations)
        if self.caller is not None:
            self.caller.leave()
        self.release()
        self.telemetry.ended(self.served)

    def release(self) -> None:
        """The body is not kept any more."""
        self.bodies.release(self._held)
        self._held = 0

    async def begin(self, status: int, content_type: str, length: int | None, more: Headers = ()) -> None:
        """Send status and headers; without `length` the body is chunked."""
        headers = [("content-type", content_type), (self.options.request_id_header_key, self.request_id), *more]
        if length is not None:
            headers.append(("content-length", str(length)))
        fields = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        self.sent_head = True
        self.served.status = status
        self.counts.response(status, self.route, self.model)
        await self.send({"type": "http.response.start", "status": status, "headers": [*fields, *_ALWAYS]})

    async def reply(self, reply: Reply) -> None:
        await self.begin(reply.status, reply.content_type, len(reply.body), reply.headers)
        await self.send({"type": "http.response.body", "body": reply.body})

    async def fail(self, error: Exception, more: tuple[tuple[str, str], ...] = ()) -> None:
        """Send an error with additional headers; nothing may have been sent yet."""
        self.served.error = type(error).__name__
        reply = self.dialect.encode_error(error, self.options)
        if self.endpoint is not None and self.dialect.sagemaker:
            reply = endpoint_error(error, reply)
        if isinstance(error, AuthenticationError):
            more += (("WWW-Authenticate", "Bearer"),)
        await self.reply(reply._replace(headers=(*reply.headers, *more)))

    @property
    def connection(self) -> ServerConnection | None:
        """None in another server than ours."""
        connection: ServerConnection | None = self.scope.get(CONNECTION)
        return connection

    def abort(self) -> None:
        """Drop the connection and what its client has not read yet, where the server can do so."""
        if self.connection is not None:
            self.connection.reset()
