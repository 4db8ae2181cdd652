"""Bytes with one thing wrong."""

from __future__ import annotations

import random

_FILLING = (b"[", b"{", b'"', b"9", b"\\")


def damaged(source: random.Random, data: bytes) -> bytes:
    """The bytes cut, with another byte, with a part missing or repeated, or with many of one kind in between."""
    at = source.randrange(len(data) + 1)
    match source.randrange(5):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + bytes([source.randrange(256)]) + data[at + 1 :]
        case 2:
            return data[:at] + data[source.randrange(len(data) + 1) :]
        case 3:
            return data[:at] + source.choice(_FILLING) * source.choice((1, 200, 5000)) + data[at:]
        case _:
            return data * 2
