"""A server of OpenAI's chat API in a thread: streams of the requested length, and a way to fail."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.support.asgi_server import listening
from tests.support.stub_http import usage_events


class OpenAiStub:
    """`fails_after`: requests that succeed before all others fail. `hangs_after`: before all others have no response.

    `seconds`: of each token.
    """

    def __init__(
        self,
        fails_after: int | None = None,
        seconds: float = 0.0,
        tokenizer: bool = True,
        hangs_after: int | None = None,
    ) -> None:
        self.fails_after, self.hangs_after, self.seconds, self.tokenizer = fails_after, hangs_after, seconds, tokenizer
        self.requests: list[Request] = []
        self.bodies: list[dict[str, Any]] = []

    async def chat(self, request: Request) -> Response:
        self.requests.append(request)
        body = await request.json()
        self.bodies.append(body)
        if self.fails_after is not None and len(self.bodies) > self.fails_after:
            return PlainTextResponse("the queue is full", 429)

        async def events() -> AsyncIterator[bytes]:
            if self.hangs_after is not None and len(self.bodies) > self.hangs_after:
                await asyncio.Event().wait()
            for event in usage_events(body["max_tokens"]):
                await asyncio.sleep(self.seconds)
                yield event

        return StreamingResponse(events(), media_type="text/event-stream")

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "stub"}]})

    async def tokenize(self, request: Request) -> Response:
        if not self.tokenizer:
            return PlainTextResponse("", 404)
        return JSONResponse({"count": 2 * len((await request.json())["prompt"].split())})

    @contextlib.asynccontextmanager
    async def application(self) -> AsyncIterator[Starlette]:
        yield Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/tokenize", self.tokenize, methods=["POST"]),
            ]
        )

    @contextlib.contextmanager
    def serving(self) -> Iterator[str]:
        """Its address."""
        with listening(self.application) as url:
            yield url
