"""A part of an answer, as DJL's Java side reads it (`ai.djl.python.engine.Request.addResponse`)."""

from __future__ import annotations

import struct
from collections import deque
from typing import NamedTuple

_LENGTH = struct.Struct(">i")
_COUNT = struct.Struct(">h")


class Item(NamedTuple):
    """What one request gets.

    `data` is text in UTF-8 and is appended to the body. The answer ends with the item that is `last`. With a `code`,
    which is an HTTP status, DJL sends `{"code", "error"}` in the place of `data`, and answers with that status if the
    request has got nothing yet. `properties` become response headers, as long as nothing was sent.
    """

    data: bytes = b""
    last: bool = False
    code: int | None = None
    error: str = ""
    properties: tuple[tuple[str, str], ...] = ()

    def encode(self) -> bytes:
        """`Output.binary_encode` of djl_python: a count of pairs, then keys and values, all of them text."""
        if self.code is not None:
            return _ERROR_KEYS[0] + _text(str(self.code)) + _ERROR_KEYS[1] + _text(self.error) + _LAST
        return _DATA + _bytes(self.data) + (_LAST_KEY_TRUE if self.last else _LAST_KEY_FALSE)


def take(items: deque[Item]) -> Item:
    """Take as many items of one request from the left as can travel as one: an error goes alone."""
    whole = items.popleft()
    while items and items[0].code is None and whole.code is None:
        more = items.popleft()
        whole = Item(whole.data + more.data, more.last, None, "", whole.properties + more.properties)
    return whole


def text(value: str) -> bytes:
    """A text on DJL's socket: its length in bytes, then UTF-8."""
    return _text(value)


def content(value: bytes) -> bytes:
    """A content without a key on DJL's socket."""
    return b"\xff\xff\xff\xff" + _bytes(value)


def count(value: int) -> bytes:
    """A count or a status on DJL's socket."""
    return _COUNT.pack(value)


def _bytes(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _text(value: str) -> bytes:
    return _bytes(value.encode())


_DATA = count(2) + _text("data")
_LAST_KEY_TRUE = _text("last") + _text("true")
_LAST_KEY_FALSE = _text("last") + _text("false")
_LAST = _text("data") + _text("") + _LAST_KEY_TRUE
_ERROR_KEYS = (count(4) + _text("code"), _text("error"))

QUIET = Item().encode()
"""Nothing new."""
