"""Reads the JSON of a request after its size was bounded: what it costs to read depends on more than its bytes.

A million objects of two bytes take a hundred times as long to make as one text of two megabytes, and nobody else runs
meanwhile. They are counted first, in pieces, between which other threads run.
"""

from __future__ import annotations

from typing import Any

import orjson

from djl_trtllm.errors import InvalidRequestError

MOST_LEVELS = 128
"""How deep lists and objects are nested. Many functions that walk over them are recursive."""
MOST_CONTAINERS = 32_768
"""Lists and objects of one request."""
MOST_TEXTS = 65_536
"""Texts of one request, with the names of members."""
MOST_VALUES = 1_048_576
"""Values of one request. They may be the token ids of long prompts."""

SMALL = 32_768
"""Bytes of which no JSON takes long to read."""
_PIECE = 65_536
_MARKS = b'",[]{}'
_ALL_BUT_MARKS = bytes(set(range(256)) - set(_MARKS))
_ALL_BUT_BRACKETS = b'",'
_ALIKE = bytes.maketrans(b"{}", b"[]")


def read_json(data: bytes) -> Any:
    """The value. Raises InvalidRequestError for JSON that is too much, orjson.JSONDecodeError for what is none."""
    if len(data) > SMALL:
        brackets = _count(data)
    elif data.count(b"[") + data.count(b"{") > MOST_LEVELS:
        brackets = _outside_of_texts(data, inside=False)[0].translate(None, _ALL_BUT_BRACKETS)
    else:
        return orjson.loads(data)
    _require_shallow(brackets)
    return orjson.loads(data)


def _count(data: bytes) -> bytes:
    """The brackets of the JSON, if there are not too many of them, of texts and of values."""
    containers = texts = values = 0
    inside = False
    found: list[bytes] = []
    for piece in _pieces(data):
        marks, quotes, inside = _outside_of_texts(piece, inside=inside)
        commas = marks.count(b",")
        brackets = marks.translate(None, _ALL_BUT_BRACKETS)
        found.append(brackets)
        containers += brackets.count(b"[") + brackets.count(b"{")
        texts += quotes
        values += commas
        # Quotation marks come in pairs, and there is a value more than there are commas.
        for count, most, what in (
            (containers, MOST_CONTAINERS, "lists and objects"),
            (texts // 2, MOST_TEXTS, "texts"),
            (values + 1, MOST_VALUES, "values"),
        ):
            if count > most:
                raise InvalidRequestError(f"the body has more than {most} {what}: send several requests")
    return b"".join(found)


def _pieces(data: bytes) -> list[bytes]:
    """The data in pieces, none of which ends within an escape."""
    pieces: list[bytes] = []
    begin = 0
    while begin < len(data):
        end = begin + _PIECE
        piece = data[begin:end]
        trailing = len(piece) - len(piece.rstrip(b"\\"))
        if trailing % 2 and end < len(data):
            end += 1
            piece = data[begin:end]
        pieces.append(piece)
        begin = end
    return pieces


def _outside_of_texts(piece: bytes, *, inside: bool) -> tuple[bytes, int, bool]:
    """The brackets and commas of a piece that are not in a text, its quotation marks, and whether it ends in a text.

    `inside`: whether it begins in one.
    """
    plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in piece else piece
    parts = plain.translate(None, _ALL_BUT_MARKS).split(b'"')
    quotes = len(parts) - 1
    return b"".join(parts[inside::2]), quotes, inside ^ (quotes % 2 == 1)


def _require_shallow(brackets: bytes) -> None:
    """Raise InvalidRequestError for brackets that are nested too deep. Every turn takes the innermost ones away."""
    levels = 0
    brackets = brackets.translate(_ALIKE)
    while brackets and levels < MOST_LEVELS:
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            return  # they do not fit each other: this is no JSON
        brackets = inner
        levels += 1
    if brackets:
        raise InvalidRequestError(f"the body is nested deeper than {MOST_LEVELS} levels")
