"""A request on its way from a gateway to a replica, and its response on the way back, as calls of Ray Serve's handles.

Ray's own proxy hands over ASGI messages by private calls, each with its object in Ray's store. Here the response is a
generator: its first item is a `Head`, the others are the bytes since the one before, however many messages they came
in. Where the gateway does not take the next item, because its client does not read, the application waits in `send`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Scope

_MOST_BYTES = 65_536
"""Of a response that wait for the gateway. An application that has sent more waits."""
_END_SECONDS = 10.0
"""What an application has to end in after the disconnection, or after its response."""
_PARTS_OF_SCOPE = (
    "type",
    "asgi",
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "query_string",
    "root_path",
    "headers",
    "client",
    "server",
)


class IncompleteResponseError(Exception):
    """The application has not sent the end of its response."""


@dataclass(frozen=True)
class ForwardedRequest:
    """A request with its whole body. `session` and `keys` (`prefix_keys`) say which replica it should have.

    One that names a `replica` goes there, whatever that has to do, as long as it is there.
    """

    scope: dict[str, Any]
    body: bytes
    session: str = ""
    keys: tuple[bytes, ...] = ()
    replica: str = ""

    @classmethod
    def of(cls, scope: Scope, body: bytes, session: str = "", keys: tuple[bytes, ...] = ()) -> ForwardedRequest:
        """Of what the ASGI server said; its callables and extensions stay there."""
        return cls({name: scope[name] for name in _PARTS_OF_SCOPE if name in scope}, body, session, keys)


@dataclass(frozen=True)
class Head:
    """What a response begins with. `whole`: `body` is all of it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    whole: bool

    def header(self, name: bytes) -> str:
        """The value of a header, by its name in lower case; empty if the response has none."""
        return next((value.decode("latin-1") for found, value in self.headers if found.lower() == name), "")


class _Channel:
    """The ASGI callables of one request, and what waits to be sent back."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self._disconnected = asyncio.Event()
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._parts: list[bytes] = []
        self._size = 0
        self.start: Message | None = None
        self.complete = False

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            return
        part = message.get("body", b"")
        self._parts.append(part)
        self._size += len(part)
        self.complete = not message.get("more_body", False)
        self._changed.set()
        while self._size > _MOST_BYTES:
            self._taken.clear()
            await self._taken.wait()

    def ended(self, _: object) -> None:
        """The application has returned: nothing more comes."""
        self._changed.set()

    def disconnect(self) -> None:
        """The client is gone."""
        self._disconnected.set()

    async def take(self) -> tuple[bytes, bool]:
        """What was sent since the last call, and whether it is the last of it.

        It waits until there is something, or the application has returned.
        """
        await self._changed.wait()
        self._changed.clear()
        parts, self._parts, self._size = self._parts, [], 0
        self._taken.set()
        return b"".join(parts), self.complete


async def answer(app: ASGIApp, request: ForwardedRequest) -> AsyncGenerator[Head | bytes, None]:
    """The application's response. Closing the generator is the disconnection of the client.

    Raises IncompleteResponseError where the application ends before its response, or what the application raises.
    """
    channel = _Channel(request.body)
    running = asyncio.ensure_future(app(request.scope, channel.receive, channel.send))
    running.add_done_callback(channel.ended)
    began = False
    try:
        while True:
            data, complete = await channel.take()
            ended = running.done() and not complete
            if not began and channel.start is not None and (data or complete):
                began = True
                yield Head(channel.start["status"], list(channel.start["headers"]), data, complete)
            elif data:
                yield data
            if complete:
                return
            if ended:
                running.result()
                raise IncompleteResponseError("the application ended before its response")
    finally:
        channel.disconnect()
        if not running.done():
            asyncio.get_running_loop().call_later(_END_SECONDS, running.cancel)
