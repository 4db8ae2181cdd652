from __future__ import annotations

import re

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.sizing.tensors import BITS, OF_TORCH, Tensor, tensors_of


@pytest.mark.parametrize(("dtype", "bytes_"), [("BF16", 30), ("F32", 60), ("I8", 15), ("F8_E4M3", 15), ("F4", 8)])
def test_the_bytes_of_a_tensor_follow_from_type_and_shape(dtype: str, bytes_: int) -> None:
    tensor = Tensor("a", dtype, (3, 5))
    assert (tensor.elements, tensor.bytes) == (15, bytes_)


def test_the_tensors_of_a_header_are_all_but_its_metadata() -> None:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}}
    assert list(tensors_of(header, "file")) == [Tensor("a", "F16", (2, 3))]


@pytest.mark.parametrize("entry", [{"dtype": "F16"}, {"dtype": "F16", "shape": ["x"]}, {"dtype": "Q9", "shape": [1]}])
def test_an_entry_that_the_format_does_not_have_is_an_error_with_its_name(entry: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match=r"shard\.safetensors: .*(lm_head|Q9)"):
        list(tensors_of({"lm_head": entry}, "shard.safetensors"))


def test_the_types_are_those_of_safetensors_and_have_their_bits_in_their_names() -> None:
    whole = {f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)}
    floats = {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"}
    assert BITS.keys() == whole | floats | {"BOOL"}
    for name, bits in BITS.items():
        found = re.search(r"\d+", name)
        assert bits == (8 if found is None else int(found[0])), name


@pytest.mark.parametrize(
    ("written", "dtype"),
    [
        ("bfloat16", "BF16"),
        ("float16", "F16"),
        ("half", "F16"),
        ("float32", "F32"),
        ("float", "F32"),
        ("float64", "F64"),
    ],
)
def test_types_of_torch_have_a_name_of_safetensors(written: str, dtype: str) -> None:
    assert OF_TORCH[written] == dtype
