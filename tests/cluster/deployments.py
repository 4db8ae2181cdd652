"""The deployments of models that a gateway calls, without Ray."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from djl_trtllm.cluster.forwarding import ForwardedRequest, answer
from djl_trtllm.cluster.known_replicas import end_waiting


class Deployment:
    """The replicas of a model: calls get the responses of `app`, or the errors of `failures` before or in them."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.failures: list[tuple[int, Exception]] = []
        """After how many parts of a response which error comes."""
        self.requests: list[ForwardedRequest] = []
        self.has_replica = True
        self.cancelled = 0

    def options(self, *, stream: bool) -> Any:
        assert stream
        return SimpleNamespace(answer=SimpleNamespace(remote=self.remote))

    def remote(self, request: ForwardedRequest) -> Call:
        self.requests.append(request)
        if self.has_replica:
            end_waiting(request)
        return Call(self, request)


class Call:
    """What Ray returns for a call with `stream`."""

    def __init__(self, deployment: Deployment, request: ForwardedRequest) -> None:
        self._parts = answer(deployment.app, request)
        self._fails = deployment.failures.pop(0) if deployment.failures else None
        self._deployment = deployment
        self._next: asyncio.Future[Any] | None = None

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        if self._fails is not None:
            parts, error = self._fails
            if not parts:
                raise error
            self._fails = (parts - 1, error)
        self._next = asyncio.ensure_future(anext(self._parts))
        try:
            return await self._next
        except asyncio.CancelledError:
            raise RuntimeError("this call was cancelled") from None

    def cancel(self) -> None:
        self._deployment.cancelled += 1
        if self._next is not None:
            self._next.cancel()


def replica(name: str) -> ASGIApp:
    """Says what it was asked, in two parts for a path that ends with `stream`."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        if name == "silent":
            await receive()
        said = {"name": name, "path": scope["path"], "size": len(body), name: 1, "data": [name]}
        status = 503 if scope["path"] == "/health" and name == "b" else 200
        headers = [(b"content-type", b"application/json"), (b"x-of", name.encode()), (b"x-replica", b"r")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if scope["path"].endswith("stream"):
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            if name == "endless":
                await receive()
                return
            await asyncio.sleep(0)
        content = json.dumps(said).encode()
        if name == "parts":
            await send({"type": "http.response.body", "body": content[:5], "more_body": True})
            await asyncio.sleep(0.001)
            content = content[5:]
        await send({"type": "http.response.body", "body": content})

    return app
