"""The peer of ceiling.py: a bare Starlette application under uvicorn that streams ready-made chunks.

Nothing is admitted, tokenised, decoded or framed here. What it costs is what HTTP streaming under uvicorn costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

LINE = b'{"token":{"id":1234,"text":" wolf","log_prob":-0.5}}\n'
LAST = b'{"token":{"id":1234,"text":" wolf","log_prob":-0.5},"generated_text":""}\n'


class Ticker:
    """Wakes every stream once per step; all of them at once, as an engine's iteration does."""

    def __init__(self, steps_per_second: float) -> None:
        self.period = 1 / steps_per_second
        self.waiters: list[asyncio.Future[None]] = []

    def next(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiters.append(future)
        return future

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(loop.time(), due + self.period)
            await asyncio.sleep(due - loop.time())
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


STEPS_PER_SECOND = float(os.environ.get("STEPS_PER_SECOND", "0"))
ticker = Ticker(STEPS_PER_SECOND) if STEPS_PER_SECOND else None


async def stream(request: Request) -> Response:
    body = await request.json()
    chunk, count = LINE * int(body["tokens_per_chunk"]), int(body["chunks"])

    async def chunks() -> AsyncIterator[bytes]:
        for number in range(1, count + 1):
            if ticker is not None:
                await ticker.next()
            else:
                await asyncio.sleep(0)
            yield chunk if number < count else chunk.removesuffix(LINE) + LAST

    return StreamingResponse(chunks(), media_type="application/jsonlines")


async def ping(_: Request) -> Response:
    return PlainTextResponse("ok")


@contextlib.asynccontextmanager
async def lifespan(_: Starlette) -> AsyncIterator[None]:
    task = asyncio.create_task(ticker.run()) if ticker is not None else None
    yield
    if task is not None:
        task.cancel()


app = Starlette(
    routes=[Route("/ping", ping), Route("/stream", stream, methods=["POST"])],
    lifespan=lifespan,
)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["PORT"]), log_level="warning", access_log=False)
