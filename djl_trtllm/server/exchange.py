"""One HTTP request and its response: the layer between ASGI and the routes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import BytesIO
from typing import TypeAlias
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
from djl_trtllm.telemetry.served_request import CLIENT_LEFT, ServedRequest

Headers: TypeAlias = Iterable[tuple[str, str]]

REFUSED = "djl_trtllm.refused"
"""ASGI extension of our server: the `status` with which it has refused a request whose body it does not read on."""

ABORT = "djl_trtllm.abort"
"""ASGI extension of our server: its `call` drops the connection. A normal close would wait for the client to read."""

WRITE = "djl_trtllm.write"
"""ASGI extension of our server: its `call` sends a part of a body of unknown length, without a message or a coroutine
for it, where the head is sent. It returns False if it has not: the client does not read, or is gone."""

_MOST_DIGITS = 20
_ALWAYS = ((b"cache-control", b"no-cache"), (b"x-content-type-options", b"nosniff"))


class BodyTooLarge(Exception):
    """The request body is larger than `max_request_size`."""


class ClientGone(Exception):
    """The client disconnected while its request was read."""


@dataclass(eq=False)
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
    route: str = ""
    """The path of the route, with its placeholders; empty if none matches."""
    model: str = ""
    """The model that generates, as soon as it is known."""
    key: ApiKey | None = None
    """The client's API key, if it needs one."""
    sent_head: bool = False
    _held: int = 0

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
        """The request body; it counts until `release`. Raises BodyTooLarge, ClientGone and OverloadedError."""
        limit = self.options.max_request_size
        declared = self.content_length
        if declared is not None and declared > limit:
            raise BodyTooLarge
        parts = BytesIO()
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                self.served.status = self.scope.get("extensions", {}).get(REFUSED, {}).get("status", CLIENT_LEFT)
                raise ClientGone
            part = message.get("body", b"")
            if self._held + len(part) > limit:
                raise BodyTooLarge
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
        """The request body of a route that reads it on the event loop. Raises RequestTooLargeError too."""
        body = await self.body()
        if len(body) > SMALL:
            raise RequestTooLargeError(f"the request body has {len(body)} bytes: {self.route} takes at most {SMALL}")
        return body

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
    def write_part(self) -> Callable[[bytes], bool]:
        """The call of the extension `WRITE`; it never sends where the server has none."""
        extension = self.scope.get("extensions", {}).get(WRITE)
        call: Callable[[bytes], bool] = _sends_nothing if extension is None else extension["call"]
        return call

    def abort(self) -> None:
        """Drop the connection and what its client has not read yet."""
        extension = self.scope.get("extensions", {}).get(ABORT)
        if extension is not None:
            extension["call"]()


def _sends_nothing(part: bytes) -> bool:
    return False
