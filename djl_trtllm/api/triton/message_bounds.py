"""Bounds what reading a protocol buffer costs, before it is read.

As with JSON (`api.json_body`) that depends on more than its bytes: millions of empty tensors take a hundred times as
long to make as one text of the same size, and nobody else runs meanwhile.
"""

from __future__ import annotations

from typing import Any

from djl_trtllm.api.json_body import MOST_WORK, SMALL
from djl_trtllm.errors import InvalidRequestError

_OF_A_FIELD, _OF_A_PACKED_BYTE = 1600, 20
"""About nanoseconds."""
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5
_LONGEST_VARINT = 10
_NUMBERS = range(1, 9)
"""Python's names of the types of a field (cpp_type) that may be packed; those behind are texts and messages."""


def require_little_work(data: bytes, descriptor: Any) -> None:
    """Raise InvalidRequestError for a message that would take long to read; `descriptor` is that of its type.

    What is damaged is left to the parser.
    """
    if len(data) <= SMALL:
        return
    work = 0
    parts = [(0, len(data), descriptor)]
    while parts:
        at, end, kind = parts.pop()
        while at < end:
            work += _OF_A_FIELD
            tag, at = _varint(data, at)
            wire = tag & 7
            if wire == _VARINT:
                _, at = _varint(data, at)
            elif wire == _LENGTH:
                size, at = _varint(data, at)
                field = kind.fields_by_number.get(tag >> 3)
                if field is not None and field.message_type is not None:
                    parts.append((at, min(end, at + size), field.message_type))
                elif field is not None and field.cpp_type in _NUMBERS:
                    work += _OF_A_PACKED_BYTE * size
                at += size
            elif wire in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if wire == _EIGHT_BYTES else 4
            else:
                raise InvalidRequestError(f"the message is not valid: a field has wire type {wire}")
            if work > MOST_WORK:
                raise InvalidRequestError(
                    f"the message has too many fields or numbers to read, of its {len(data)} bytes: send several "
                    "requests, or tensors as raw_input_contents"
                )


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place behind it."""
    value = 0
    for shift, byte in enumerate(data[at : at + _LONGEST_VARINT]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    return value, len(data)
