from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest

from djl_trtllm.api.triton.tensors import MOST_ELEMENTS, Tensor, from_bytes, from_json, to_bytes
from djl_trtllm.errors import InvalidRequestError

NUMBERS = {
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BOOL": np.bool_,
}


@pytest.mark.parametrize("datatype", NUMBERS)
def test_every_datatype_is_read_and_written_as_numpy_does(datatype: str) -> None:
    array: Any = np.array([[1, 0, 1], [1, 1, 0]], NUMBERS[datatype])
    tensor = from_bytes("x", datatype, [2, 3], array.tobytes())
    assert tensor == Tensor("x", datatype, (2, 3), array.ravel().tolist())
    assert to_bytes(tensor) == array.tobytes()


def test_bf16_is_the_upper_half_of_a_float() -> None:
    raw = struct.pack("<f", 0.5)[2:] + struct.pack("<f", -3.0)[2:]
    assert from_bytes("x", "BF16", [2], raw).data == [0.5, -3.0]


def test_strings_follow_their_lengths() -> None:
    raw = b"\x03\0\0\0abc\0\0\0\0\x02\0\0\0" + "é".encode()
    tensor = from_bytes("x", "BYTES", [1, 3], raw)
    assert tensor.data == ["abc", "", "é"]
    assert to_bytes(tensor) == raw


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "message"),
    [
        ("INT32", [2], b"\0\0\0\0", "has 4 bytes: expected 8, for 2 elements of INT32"),
        ("INT32", [], b"", "has 0 bytes: expected 4"),
        ("STRING", [1], b"", 'has the datatype "STRING"'),
        (["INT32"], [1], b"", "has the datatype"),
        ("INT32", [-1], b"", "expected numbers from 0"),
        ("INT32", [True], b"", "expected numbers from 0"),
        ("INT32", [2**31], b"", "expected numbers from 0"),
        ("INT32", "11", b"", "expected a list"),
        ("INT32", None, b"", "expected a list"),
        ("INT32", [1] * 9, b"", "expected a list of up to 8 numbers"),
        ("INT32", [2**30, 2**30], b"", f"expected at most {MOST_ELEMENTS}"),
        ("BYTES", [1], b"\x04\0\0\0abc", "an element of 4 bytes where 3 are left"),
        ("BYTES", [1], b"\xff\xff\xff\xffabc", "an element of 4294967295 bytes"),
        ("BYTES", [2], b"\x03\0\0\0abc", "has 1 elements in 7 of its 7 bytes: expected 2"),
        ("BYTES", [1], b"\x01\0\0\0a\0", "in 5 of its 6 bytes"),
        ("BYTES", [1], b"\x01\0", "has 0 elements"),
        ("BYTES", [1], b"\x01\0\0\0\xff", "not UTF-8"),
    ],
)
def test_bytes_that_are_no_such_tensor_are_refused(datatype: Any, shape: Any, raw: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"input 'x'.*") as caught:
        from_bytes("x", datatype, shape, raw)
    assert message in str(caught.value)


@pytest.mark.parametrize("data", [[1, 2, 3, 4], [[1, 2], [3, 4]], [[[1], [2]], [[3], [4]]]])
def test_json_is_flat_or_nested(data: Any) -> None:
    assert from_json("x", "INT32", [2, 2], data) == Tensor("x", "INT32", (2, 2), [1, 2, 3, 4])


def test_json_of_one_element_needs_no_list() -> None:
    assert from_json("x", "BYTES", [1, 1], "a").data == ["a"]


@pytest.mark.parametrize(
    ("datatype", "data", "message"),
    [
        ("INT32", [1, 2], "has 2 elements: expected 1"),
        ("INT32", ["1"], 'has "1": expected elements of INT32'),
        ("INT32", [True], "has true"),
        ("INT32", None, "has null"),
        ("BOOL", [1], "expected elements of BOOL"),
        ("BYTES", [1], "expected elements of BYTES"),
        ("BYTES", [[[[[[[[[[["a"]]]]]]]]]]], "expected elements of BYTES"),
        ("FP32", [{}], "has {}"),
        ("INT32", [1] * (MOST_ELEMENTS + 1), f"has {MOST_ELEMENTS + 1} elements: expected 1"),
        ("INT32", [[1] * (MOST_ELEMENTS + 1)], "has too many elements: expected 1"),
    ],
)
def test_json_that_is_no_such_tensor_is_refused(datatype: str, data: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match="input 'x'") as caught:
        from_json("x", datatype, [1], data)
    assert message in str(caught.value)


def test_a_tensor_has_at_most_8192_elements_however_they_are_nested() -> None:
    for data in ([1] * 8192, [[1] * 8192], [[1] * 4096] * 2):
        assert len(from_json("x", "INT32", [8192], data).data) == 8192
    with pytest.raises(InvalidRequestError, match=r"has 8193 elements, of the shape .*: expected at most 8192"):
        from_json("x", "INT32", [8193], [1] * 8193)


def test_no_more_strings_are_read_than_the_shape_says() -> None:
    with pytest.raises(InvalidRequestError, match="has 1 elements in 5 of its 10 bytes: expected 1 elements"):
        from_bytes("x", "BYTES", [1], b"\x01\0\0\0a" * 2)
