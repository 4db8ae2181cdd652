"""Sends snapshots to the open pages, as Server-Sent Events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from djl_trtllm.errors import OverloadedError
from djl_trtllm.server.exchange import Exchange

PERIOD = 0.25
"""Seconds between two snapshots."""
MOST = 4
"""Pages that may watch at once."""
_RETRY_SECONDS = 5
_SLACK = 0.001
"""Timers may fire this much early."""
_HEADERS = (("X-Accel-Buffering", "no"),)
"""Proxies pass each snapshot on at once."""


class Watchers:
    """The open pages.

    Time is cut into periods, and a snapshot is made for the first page that wants one in a period. So all pages of a
    model share it, without pages there are none, and a page that reads slowly leaves out those that it is late for.
    """

    def __init__(self, make: Callable[[str | None], bytes]) -> None:
        """`make` makes the snapshot of a model, as JSON."""
        self.count = 0
        self._make = make
        self._made: dict[str | None, bytes] = {}
        self._period = -1
        self._closed = asyncio.Event()

    def close(self) -> None:
        """End the streams of all pages."""
        self._closed.set()

    async def watch(self, exchange: Exchange, name: str | None) -> None:
        """Send snapshots of a model until the page is closed. Raises OverloadedError."""
        if self.count >= MOST:
            raise OverloadedError(
                f"{self.count} pages watch already, and no more than {MOST} may; close one of them",
                queue_depth=self.count,
                capacity=MOST,
                retry_after=_RETRY_SECONDS,
            )
        self.count += 1
        now = asyncio.get_running_loop().time
        over = asyncio.ensure_future(self._over(exchange))
        try:
            await exchange.begin(200, "text/event-stream; charset=utf-8", None, _HEADERS)
            while not over.done():
                # A page that does not read keeps this waiting, as long as a client of a stream may.
                if not await self._send(exchange, name, over):
                    exchange.abort()
                    return
                await asyncio.wait({over}, timeout=PERIOD - now() % PERIOD + _SLACK)
            if self._closed.is_set():
                await exchange.send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.count -= 1
            over.cancel()

    async def _send(self, exchange: Exchange, name: str | None, over: asyncio.Future[None]) -> bool:
        """Send the snapshot of this period; whether it could be sent in time."""
        body = b"data: " + self._snapshot(name) + b"\n\n"
        message = {"type": "http.response.body", "body": body, "more_body": True}
        sending = asyncio.ensure_future(_whole(exchange.send(message)))
        timeout = exchange.options.stream_write_timeout
        await asyncio.wait({sending, over}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            sending.cancel()
            return False
        sending.result()
        return True

    async def _over(self, exchange: Exchange) -> None:
        """Until the page is closed, or the server ends."""
        gone = asyncio.ensure_future(_disconnected(exchange))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait({gone, closed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            closed.cancel()

    def _snapshot(self, name: str | None) -> bytes:
        period = int(asyncio.get_running_loop().time() / PERIOD)
        if period != self._period:
            self._period = period
            self._made.clear()
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]


async def _whole(sending: Awaitable[None]) -> None:
    await sending


async def _disconnected(exchange: Exchange) -> None:
    while (await exchange.receive())["type"] != "http.disconnect":
        pass
