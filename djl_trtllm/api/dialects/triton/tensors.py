"""Triton's tensors as flat lists of Python values, from JSON and from bytes.

Everything about a tensor is checked before it is unpacked, so that the sizes that a request states cost nothing by
themselves.
"""

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

from djl_trtllm.api.parameters import show
from djl_trtllm.errors import InvalidRequestError

BYTES = "BYTES"
BOOL = "BOOL"
_BFLOAT16 = "BF16"
_CODES = {
    BOOL: "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
    _BFLOAT16: "H",
}
"""`struct`'s codes of the datatypes with elements of one size."""
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 8

MOST_ELEMENTS = 8192
"""The most elements of one tensor: more prompts, each with as many words as a request may have, are refused."""


class Tensor(NamedTuple):
    """`data` has the elements in row-major order; those of BYTES are strings."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: list[Any]


def check(name: str, datatype: Any, shape: Any) -> int:
    """The number of elements of such a tensor. Raises InvalidRequestError."""
    if type(datatype) is not str or (datatype != BYTES and datatype not in _CODES):
        raise InvalidRequestError(
            f"input '{name}' has the datatype {show(datatype)}: expected one of {', '.join((*_CODES, BYTES))}"
        )
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) > _MOST_DIMENSIONS:
        raise InvalidRequestError(
            f"input '{name}' has the shape {show(shape)}: expected a list of up to {_MOST_DIMENSIONS} numbers"
        )
    if not all(type(size) is int and 0 <= size < 2**31 for size in shape):
        raise InvalidRequestError(f"input '{name}' has the shape {show(list(shape))}: expected numbers from 0")
    count = math.prod(shape)
    if count > MOST_ELEMENTS:
        raise InvalidRequestError(
            f"input '{name}' has {count} elements, of the shape {show(list(shape))}: expected at most {MOST_ELEMENTS}"
        )
    return count


def from_bytes(name: str, datatype: Any, shape: Any, raw: bytes) -> Tensor:
    """A tensor from its bytes: little-endian elements, strings after their length. Raises InvalidRequestError."""
    count = check(name, datatype, shape)
    if datatype == BYTES:
        return Tensor(name, datatype, tuple(shape), _strings(name, count, raw))
    layout = struct.Struct(f"<{count}{_CODES[datatype]}")
    if len(raw) != layout.size:
        raise InvalidRequestError(
            f"input '{name}' has {len(raw)} bytes: expected {layout.size}, for {count} elements of {datatype}"
        )
    data: list[Any] = list(layout.unpack(raw))
    if datatype == _BFLOAT16:
        # The upper half of a 32-bit float.
        data = list(struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(value << 16 for value in data))))
    return Tensor(name, datatype, tuple(shape), data)


def from_json(name: str, datatype: Any, shape: Any, data: Any) -> Tensor:
    """A tensor from JSON, where `data` is flat or nested as the shape says. Raises InvalidRequestError."""
    count = check(name, datatype, shape)
    values = data if type(data) is list else [data]
    if len(values) > MOST_ELEMENTS:
        raise InvalidRequestError(f"input '{name}' has {len(values)} elements: expected {count}, as the shape says")
    for _ in range(_MOST_DIMENSIONS):
        if not any(type(value) is list for value in values):
            break
        # Counted first: what is nested may be much more than the shape says.
        if sum(len(value) if type(value) is list else 1 for value in values) > MOST_ELEMENTS:
            raise InvalidRequestError(f"input '{name}' has too many elements: expected {count}, as the shape says")
        values = [inner for value in values for inner in (value if type(value) is list else [value])]
    if len(values) != count:
        raise InvalidRequestError(
            f"input '{name}' has {len(values)} elements: expected {count}, for the shape {show(list(shape))}"
        )
    types = {BYTES: (str,), BOOL: (bool,)}.get(datatype, (int, float))
    for value in values:
        if type(value) not in types:
            raise InvalidRequestError(f"input '{name}' has {show(value)}: expected elements of {datatype}")
    return Tensor(name, datatype, tuple(shape), values)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, the reverse of `from_bytes`. BF16 is not written."""
    if tensor.datatype == BYTES:
        encoded = [value.encode("utf-8", "replace") for value in tensor.data]
        return b"".join([_LENGTH.pack(len(value)) + value for value in encoded])
    return struct.pack(f"<{len(tensor.data)}{_CODES[tensor.datatype]}", *tensor.data)


def _strings(name: str, count: int, raw: bytes) -> list[Any]:
    strings: list[Any] = []
    at = 0
    while at < len(raw) and len(strings) < count:
        if at + _LENGTH.size > len(raw):
            break
        (length,) = _LENGTH.unpack_from(raw, at)
        at += _LENGTH.size
        if at + length > len(raw):
            raise InvalidRequestError(
                f"input '{name}' has an element of {length} bytes where {len(raw) - at} are left: expected each "
                "element to be its length, 4 bytes, and its text"
            )
        try:
            strings.append(raw[at : at + length].decode())
        except UnicodeDecodeError:
            raise InvalidRequestError(f"input '{name}' is not UTF-8 text") from None
        at += length
    if len(strings) != count or at != len(raw):
        raise InvalidRequestError(
            f"input '{name}' has {len(strings)} elements in {at} of its {len(raw)} bytes: expected {count} elements"
        )
    return strings
