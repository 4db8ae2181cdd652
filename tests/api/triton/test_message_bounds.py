from __future__ import annotations

import pytest

from djl_trtllm.api.triton.message_bounds import require_little_work
from djl_trtllm.api.triton.protocol import ModelInferRequest
from djl_trtllm.errors import InvalidRequestError

LARGE = 100_000


def field(number: int, data: bytes) -> bytes:
    """A field of text, bytes, packed numbers or a message."""
    size, length = len(data), []
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + data


INPUTS, PARAMETERS, RAW, CONTENTS, INT, BYTES, SHAPE = 5, 4, 7, 5, 2, 8, 3
UNKNOWN = b"\xf8\x07\x01"


def check(data: bytes) -> None:
    require_little_work(data, ModelInferRequest.DESCRIPTOR)


def of_tensor(contents: bytes) -> bytes:
    return field(INPUTS, field(CONTENTS, contents))


@pytest.mark.parametrize(
    ("data", "most"),
    [
        (field(INPUTS, b""), 5000),
        (field(RAW, b""), 5000),
        (field(PARAMETERS, field(1, b"a")), 2500),
        (UNKNOWN, 5000),
        (b"\xf9\x07" + bytes(8), 5000),
        (b"\xfd\x07" + bytes(4), 5000),
        (field(14, b"\xff\xff"), 5000),
    ],
)
def test_fields_are_counted_in_every_message_of_a_message(data: bytes, most: int) -> None:
    padding = field(RAW, b"x" * LARGE)
    check(padding + data * (most - 1))
    with pytest.raises(InvalidRequestError, match=f"too many fields .* of its {len(padding) + len(data) * most} bytes"):
        check(data * most + padding)


@pytest.mark.parametrize("number", [BYTES, 1])
def test_fields_deep_within_are_counted(number: int) -> None:
    element = field(number, b"")
    check(of_tensor(element * 4000 + field(BYTES, b"x" * LARGE)))
    with pytest.raises(InvalidRequestError, match="too many fields"):
        check(of_tensor(element * 5000 + field(BYTES, b"x" * LARGE)))


def test_packed_numbers_are_counted_and_texts_are_not() -> None:
    check(of_tensor(field(INT, b"\x01" * 390_000)))
    check(of_tensor(field(BYTES, b"\x01" * 5_000_000)))
    check(field(RAW, b"\x01" * 5_000_000))
    for data in (of_tensor(field(INT, b"\x01" * 400_000)), field(INPUTS, field(SHAPE, b"\x01" * 400_000))):
        with pytest.raises(InvalidRequestError, match="too many fields"):
            check(data)


def test_a_small_message_is_not_looked_at() -> None:
    check(UNKNOWN * (32_768 // 3))


@pytest.mark.parametrize("end", [b"\x08" + b"\xff" * 11, b"\x08", field(INPUTS, b"ab")[:-1], b"\x09", b"\x0d\x00"])
def test_what_is_damaged_is_left_to_the_parser(end: bytes) -> None:
    check(field(RAW, b"x" * LARGE) + end)


@pytest.mark.parametrize("wire", [3, 4, 6, 7])
def test_other_fields_are_refused(wire: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"a field has wire type {wire}"):
        check(bytes([8 | wire]) * LARGE)
