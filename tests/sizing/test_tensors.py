from __future__ import annotations

import pytest

from djl_trtllm.errors import LayoutError
from djl_trtllm.sizing.tensors import Tensor, tensors_of


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
