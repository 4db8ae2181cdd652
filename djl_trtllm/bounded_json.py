"""JSON of clients: read only where its size and depth are within bounds, which are counted before it is read.

    read_json(b'{"inputs": "Once"}')    # {"inputs": "Once"}
    read_json(b"[" * 1000)              # InvalidRequestError: the body is nested deeper than 128 levels

What JSON costs to read depends on more than its bytes. A million objects of two bytes take a hundred times as long to
make as one text of two megabytes, and nobody else runs meanwhile. They are counted first, in pieces, between which
other threads run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import orjson

from djl_trtllm import errors

MOST_LEVELS = 128
"""How deep lists and objects are nested. Many functions that walk over them are recursive."""
MOST_WORK = 8_000_000
"""About nanoseconds that reading may take. All threads of the process wait as long."""
OF_A_CONTAINER, OF_A_MEMBER, OF_A_TEXT, OF_A_BYTE = 60, 150, 40, 4
"""The work of a list or object, of a member of an object, of a text's quotation marks, and of a byte outside texts."""
OF_A_TEXT_BYTE, OF_A_BACKSLASH = 1, 1
"""The work of a byte of a text, and the further work of a backslash in it."""
_USUAL_BYTES = 6 << 20
"""The default of `max_request_size`. Where the operator allows more, what is beyond it may be texts."""

SMALL = 32_768
"""JSON of up to this number of bytes never takes long to read."""
_PIECE = 65_536
_ALL_BUT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_ALIKE = bytes.maketrans(b"{}", b"[]")
_STEPS = bytes.maketrans(b"[]", b"\x01\xff")
"""A bracket as the number of levels that it adds, as a signed byte."""
_BRACKETS_AT_ONCE = 8192
_EASY_LEVELS = 3


def read_json(data: bytes) -> Any:
    """The value. Raises InvalidRequestError for JSON that is too much, orjson.JSONDecodeError for what is none."""
    if len(data) > SMALL or data.count(b"[") + data.count(b"{") > MOST_LEVELS:
        _require_shallow(_count(data))
    return orjson.loads(data)


def parse_json(data: bytes, what: str = "the body") -> Any:
    """The value. Raises InvalidRequestError, in which the data is called `what`, if it is too much or no JSON."""
    try:
        return read_json(data)
    except orjson.JSONDecodeError as error:
        shown = data[:80].decode(errors="replace")
        raise errors.InvalidRequestError(f"{what} is not valid JSON: {error}. Received {shown!r}") from None


def _count(data: bytes) -> bytes:
    """The brackets of the JSON, if it does not take too long to read."""
    containers = members = quotes = outside = within = escapes = 0
    most = MOST_WORK + (OF_A_TEXT_BYTE + OF_A_BACKSLASH) * max(0, len(data) - _USUAL_BYTES)
    inside = False
    found: list[bytes] = []
    for piece in _pieces(data):
        plain, more, inside = _outside_of_texts(piece, inside=inside)
        brackets = plain.translate(None, _ALL_BUT_BRACKETS)
        found.append(brackets)
        outside += len(plain)
        within += len(piece) - len(plain)
        if b"\\" in piece:
            # `count` takes ten times as long where there are many.
            escapes += len(piece) - len(piece.translate(None, b"\\"))
        quotes += more
        members += plain.count(b":")
        containers += brackets.count(b"[") + brackets.count(b"{")
        texts = quotes // 2
        work = OF_A_BYTE * outside + OF_A_TEXT * texts + OF_A_MEMBER * members + OF_A_CONTAINER * containers
        work += OF_A_TEXT_BYTE * within + OF_A_BACKSLASH * escapes
        if work > most:
            raise errors.InvalidRequestError(
                f"the body has too much JSON to read, {containers} lists and objects, {members} members, {texts} "
                f"texts of {within} bytes with {escapes} backslashes, and {outside} bytes of other values up to where "
                "reading ended: send several requests"
            )
    return b"".join(found)


def _pieces(data: bytes) -> Iterator[bytes]:
    """The data in pieces. No piece ends within an escape."""
    begin = 0
    while begin < len(data):
        end = begin + _PIECE
        piece = data[begin:end]
        trailing = len(piece) - len(piece.rstrip(b"\\"))
        if trailing % 2 and end < len(data):
            end += 1
            piece = data[begin:end]
        yield piece
        begin = end


def _outside_of_texts(piece: bytes, *, inside: bool) -> tuple[bytes, int, bool]:
    """Return the bytes of a piece outside texts, the number of quotation marks, and whether the piece ends in a text.

    `inside`: whether it begins in one.
    """
    if b'"' not in piece:
        return b"" if inside else piece, 0, inside
    plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
    parts = plain.split(b'"')
    quotes = len(parts) - 1
    return b"".join(parts[inside::2]), quotes, inside ^ (quotes % 2 == 1)


def _require_shallow(brackets: bytes) -> None:
    """Raise InvalidRequestError for brackets that are nested too deep."""
    brackets = brackets.translate(_ALIKE)
    level = 0
    for _ in range(_EASY_LEVELS):
        # Takes one level away. Most bodies are wide and have no more.
        brackets = brackets.replace(b"[]", b"")
    for begin in range(0, len(brackets), _BRACKETS_AT_ONCE):
        steps = array("b", brackets[begin : begin + _BRACKETS_AT_ONCE].translate(_STEPS))
        levels = list(accumulate(steps, initial=level))
        level = levels[-1]
        if max(levels) > MOST_LEVELS - _EASY_LEVELS:
            raise errors.InvalidRequestError(f"the body is nested deeper than {MOST_LEVELS} levels")
