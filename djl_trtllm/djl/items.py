"""A part of a response, as DJL's Java side reads it (`ai.djl.python.engine.Request.addResponse`)."""

import logging
import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from djl_trtllm.api import Call, ResponseEncoder
from djl_trtllm.api.registry import DEFAULT
from djl_trtllm.config import Options
from djl_trtllm.errors import RequestError
from djl_trtllm.logs import of_request
from djl_trtllm.request import OutputChunk
from djl_trtllm.telemetry import ServedRequest, Telemetry

_LENGTH = struct.Struct(">i")
_COUNT = struct.Struct(">h")


class Item(NamedTuple):
    """A part of the response to one request.

    `data` is UTF-8 text; DJL appends it to the body. The item with `last` ends the response, and has no data. With a
    `code`, an HTTP status, DJL sends `{"code", "error"}` instead of `data`, and answers with that status if it has sent
    nothing yet.
    `properties` become response headers until the first part is sent.
    """

    data: bytes = b""
    last: bool = False
    code: int | None = None
    error: str = ""
    properties: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """`Output.binary_encode` of djl_python: the number of pairs, then keys and values, all as text."""
        if self.code is not None:
            return _ERROR_KEYS[0] + text(str(self.code)) + _ERROR_KEYS[1] + text(self.error) + _LAST
        return _DATA + _bytes(self.data) + (_LAST_KEY_TRUE if self.last else _LAST_KEY_FALSE)


def take(items: deque[Item]) -> Item:
    """Remove items of one request from the left and merge those that can be sent as one: not an error, nor the last.

    DJL marks a response as complete before it appends the last part to it (`ChunkedBytesSupplier.appendContent` of 0.34
    and 0.36): a client's thread that looks in between never gets that part. So nothing is in it.
    """
    whole = items.popleft()
    while items and items[0].code is None and whole.code is None and not items[0].last:
        more = items.popleft()
        whole = Item(whole.data + more.data, False, None, "", whole.properties + more.properties)
    return whole


def text(value: str) -> bytes:
    """Text on DJL's socket: its length in bytes, then UTF-8."""
    return _bytes(value.encode())


def content(value: bytes) -> bytes:
    """A content without a key on DJL's socket."""
    return b"\xff\xff\xff\xff" + _bytes(value)


def count(value: int) -> bytes:
    """A count or status on DJL's socket."""
    return _COUNT.pack(value)


def _bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


_DATA = count(2) + text("data")
_LAST_KEY_TRUE = text("last") + text("true")
_LAST_KEY_FALSE = text("last") + text("false")
_LAST = text("data") + text("") + _LAST_KEY_TRUE
_ERROR_KEYS = (count(4) + text("code"), text("error"))

QUIET = Item().encode()
"""No new data."""


logger = logging.getLogger(__name__)

_OK = 200


class ItemWriter:
    """Encodes the output of one request and emits items; exactly one of them is the last, and has no data.

    `served` is the request, which `telemetry` reports after that.
    """

    def __init__(
        self,
        put: Callable[[Item], None],
        options: Options,
        served: ServedRequest,
        telemetry: Telemetry,
    ) -> None:
        self.served = served
        self._telemetry = telemetry
        self.complete = False
        self._put = put
        self._options = options
        self._encoder: ResponseEncoder | None = None
        self._headers: tuple[tuple[str, str], ...] = ()
        self._unfinished: int
        self._begun = False

    def expect(self, call: Call) -> None:
        """Call when the request is parsed: its encoder makes the response from now on."""
        self._telemetry.began(self.served, call.requests)
        self._encoder = call.encoder
        self._headers = call.headers
        self._unfinished = call.sequences

    def deliver(self, chunk: OutputChunk) -> None:
        if self.complete:
            return
        assert self._encoder is not None
        finished = chunk.finished
        if finished is not None:
            self._unfinished -= 1
            if finished.error is not None and not self._begun:
                self.fail(finished.error)
                return
        try:
            data = self._encoder.encode(chunk)
        except Exception as error:
            self.fail(error)
            return
        last = not self._unfinished
        if data or last:
            self._send(data, last)

    def fail(self, error: Exception) -> None:
        """End the response with an error: a status if nothing was sent yet, else in the dialect's format."""
        if self.complete:
            return
        if not isinstance(error, RequestError):
            logger.error("a request failed", exc_info=error, extra=of_request(self.served.id))
        self.served.error = type(error).__name__
        encoder = self._encoder if self._begun else None
        if encoder is not None and isinstance(error, RequestError) and (data := encoder.error(error)):
            self._send(data, last=True)
            return
        reply = DEFAULT.encode_error(error, self._options)
        self._complete(reply.status)
        message = str(error) if isinstance(error, RequestError) else "Internal server error, see the server's log."
        self._put(Item(b"", True, reply.status, message, (("Content-Type", "application/json"), *reply.headers)))

    def _complete(self, status: int) -> None:
        self.complete = True
        self.served.status = status
        self._telemetry.ended_soon(self.served)

    def _send(self, data: bytes, last: bool) -> None:
        assert self._encoder is not None
        properties = () if self._begun else (("Content-Type", self._encoder.content_type), *self._headers)
        self._begun = True
        if last:
            self._complete(_OK)
        if data:
            self._put(Item(data, False, None, "", properties))
            properties = ()
        if last:
            self._put(Item(b"", True, None, "", properties))
