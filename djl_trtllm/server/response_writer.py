"""Writes the response to one request, called by the rolling batch for every output chunk.

A task per stream that wakes up for every token would be the largest cost of a streaming server. Instead the rolling
batch calls `ResponseWriter.deliver`, which gives the bytes to the transport at once, in the same turn of the event
loop for all streams. Nothing of the request is on a stack meanwhile, if the server calls when the client is gone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Generator
from functools import partial
from types import coroutine
from typing import Any, cast

from djl_trtllm.api import Call
from djl_trtllm.errors import RequestError
from djl_trtllm.logs import of_request
from djl_trtllm.request import OutputChunk
from djl_trtllm.server.exchange import Exchange

logger = logging.getLogger(__name__)


@coroutine
def _resume(step: Coroutine[Any, Any, None], waits_for: Any) -> Generator[Any, Any, None]:
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
        except StopIteration:
            return


async def _rest(step: Coroutine[Any, Any, None], waits_for: Any) -> None:
    await _resume(step, waits_for)


def start_now(step: Coroutine[Any, Any, None]) -> Coroutine[Any, Any, None] | None:
    """Run a coroutine up to its first real wait. Returns None if it ended, otherwise the rest of it, to be awaited.

    `asyncio.eager_task_factory` does this from Python 3.12 on; this needs no task for coroutines that never wait.
    """
    try:
        waits_for = step.send(None)
    except StopIteration:
        return None
    return _rest(step, waits_for)


class ResponseWriter:
    """Encodes the output chunks of one call into ASGI messages.

    While the client does not read, chunks are kept and sent together when it reads again; after
    `stream_write_timeout` seconds the client is dropped.
    """

    __slots__ = (
        "_blocked",
        "_closed",
        "_complete",
        "_connection",
        "_encoder",
        "_exchange",
        "_headers",
        "_kept",
        "_late_headers",
        "_listening",
        "_unfinished",
        "_write_timeout",
    )

    def __init__(self, call: Call, exchange: Exchange) -> None:
        self._encoder = call.encoder
        self._headers = call.headers
        self._late_headers = call.late_headers
        self._exchange = exchange
        self._unfinished = call.sequences
        self._connection = exchange.connection
        self._write_timeout = exchange.options.stream_write_timeout
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
        """Done when the response is sent, or the client is gone or does not read; then the exchange ends."""
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
            while (await self._exchange.receive())["type"] != "http.disconnect":
                pass
        finally:
            self._close()

    def _send_encoded(self, chunks: list[OutputChunk]) -> None:
        try:
            data = self._encode(chunks[0]) if len(chunks) == 1 else b"".join([self._encode(chunk) for chunk in chunks])
        except Exception as error:
            self._break_off(error)
            return
        if not self._complete:
            connection = self._connection
            if not data or (connection is not None and self._exchange.sent_head and connection.write_part(data)):
                return
        self._run(self._body(data))

    def _encode(self, chunk: OutputChunk) -> bytes:
        finished = chunk.finished
        if finished is not None:
            self._unfinished -= 1
            self._complete = not self._unfinished
            if finished.error is not None and not self._exchange.sent_head:
                raise finished.error
        return self._encoder.encode(chunk)

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
            self._send_encoded(kept)

    def _lose(self, error: OSError) -> None:
        logger.info("the client is gone: %s", error, extra=self._belonging)
        self._close()

    @property
    def _belonging(self) -> dict[str, str]:
        """The rolling batch calls for many requests."""
        return of_request(self._exchange.request_id)

    def _close(self) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
