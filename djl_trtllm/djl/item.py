"""A part of a response, as DJL's Java side reads it (`ai.djl.python.engine.Request.addResponse`)."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

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
