from __future__ import annotations

import re

import pytest

from djl_trtllm.config.options.choices import KvCacheDType, QuantAlgorithm, Quantization
from djl_trtllm.errors import LayoutError, SizingError
from djl_trtllm.sizing.tensors import (
    BITS,
    OF_TORCH,
    WEIGHT_FORMATS,
    Division,
    Part,
    WeightTensor,
    cache_bits,
    group_of,
    indivisible_heads,
    layer_of,
    parts_of,
    stage_of,
    tensors_of,
    weight_bits,
)
from tests.support.tables import by_table


@pytest.mark.parametrize(("dtype", "bytes_"), [("BF16", 30), ("F32", 60), ("I8", 15), ("F8_E4M3", 15), ("F4", 8)])
def test_the_bytes_of_a_tensor_follow_from_type_and_shape(dtype: str, bytes_: int) -> None:
    tensor = WeightTensor("a", dtype, (3, 5))
    assert (tensor.elements, tensor.bytes) == (15, bytes_)


def test_the_tensors_of_a_header_are_all_but_its_metadata() -> None:
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}}
    assert list(tensors_of(header, "file")) == [WeightTensor("a", "F16", (2, 3))]


@pytest.mark.parametrize("entry", [{"dtype": "F16"}, {"dtype": "F16", "shape": ["x"]}, {"dtype": "Q9", "shape": [1]}])
def test_an_entry_that_the_format_does_not_have_is_an_error_with_its_name(entry: dict[str, object]) -> None:
    with pytest.raises(LayoutError, match=r"shard\.safetensors: .*(lm_head|Q9)"):
        list(tensors_of({"lm_head": entry}, "shard.safetensors"))


@pytest.mark.parametrize("shape", [[float("inf")], [-1], [2**48], [1] * 17])
def test_a_shape_that_no_tensor_has_is_refused(shape: list[float]) -> None:
    with pytest.raises(LayoutError, match="'lm_head' wrongly"):
        list(tensors_of({"lm_head": {"dtype": "F16", "shape": shape}}, "shard.safetensors"))


def test_the_types_are_those_of_safetensors_and_have_their_bits_in_their_names() -> None:
    whole = {f"{kind}{bits}" for kind in "IU" for bits in (8, 16, 32, 64)}
    floats = {"F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4"}
    assert BITS.keys() == whole | floats | {"BOOL"}
    assert set(OF_TORCH.values()) == {"BF16", "F16", "F32", "F64"}
    assert all(dtype in (f"F{name[-2:]}", f"BF{name[-2:]}") for name, dtype in OF_TORCH.items() if name[-2:].isdigit())
    assert (OF_TORCH["half"], OF_TORCH["float"], OF_TORCH["bfloat16"]) == ("F16", "F32", "BF16")
    for name, bits in BITS.items():
        found = re.search(r"\d+", name)
        assert bits == (8 if found is None else int(found[0])), name


@by_table("name", "bits")
def test_scales_are_spread_over_the_weights_that_share_them(name: str, bits: float) -> None:
    assert weight_bits(name) == bits


def test_every_value_of_the_options_has_a_size() -> None:
    for choice in (*Quantization, *QuantAlgorithm):
        assert 4 <= weight_bits(choice.value) <= 16
    for dtype in set(KvCacheDType) - {KvCacheDType.AUTO}:
        assert 4 <= cache_bits(dtype.value) <= 32


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(SizingError, match=r"fp9: expected a quantisation; did you mean fp8\?"):
        weight_bits("fp9")
    with pytest.raises(SizingError, match=r"zz: expected a type of the KV cache; known are fp8"):
        cache_bits("zz")


SCALES = {"GPTQ": 0.25, "AWQ": 0.125, "PER_GROUP": 0.125, "BLOCK_SCALES": 32 / 128**2, "NVFP4": 0.5, "MXFP4": 0.25}
"""Bits per weight of the scales, by what the name of a format contains."""


@pytest.mark.parametrize("name", sorted(set(WEIGHT_FORMATS) - {"no_quant", "mixed_precision"}))
def test_a_format_has_the_bits_of_its_name_and_those_of_its_scales(name: str) -> None:
    bits = re.search(r"(?:w|fp|int)(\d)", name)
    assert bits is not None
    scales = [size for part, size in SCALES.items() if part.lower() in name]
    assert WEIGHT_FORMATS[name] == int(bits[1]) + sum(scales)


@pytest.mark.parametrize("dtype", ["fp8", "int8", "fp16", "float16", "bf16", "bfloat16", "fp32", "float32", "nvfp4"])
def test_a_type_of_the_cache_has_the_bits_of_its_name(dtype: str) -> None:
    bits = re.search(r"\d+", dtype)
    assert bits is not None
    assert cache_bits(dtype) == int(bits[0]) + (0.5 if dtype == "nvfp4" else 0)


@by_table("name", "group")
def test_the_name_says_how_a_tensor_is_divided(name: str, group: str) -> None:
    assert group_of(WeightTensor(name, "BF16", (8, 8))) == group


def test_the_layer_is_the_number_in_the_name() -> None:
    assert layer_of(WeightTensor("transformer.h.13.ln_1.weight", "F16", (8,))) == 13
    assert layer_of(WeightTensor("vision_tower.layers.13.ln_1.weight", "F16", (8,))) is None
    assert layer_of(WeightTensor("lm_head.weight", "F16", (8, 8))) is None
    assert group_of(WeightTensor("model.layers.3.input_layernorm.weight", "BF16", (8,))) == "replicated"


def test_keys_of_few_heads_are_replicated() -> None:
    division = Division(8, 32, 2)
    assert division.share("matrix") == 1 / 8
    assert division.share("key_value") == 1 / 2
    assert division.share("fused") == (32 / 8 + 2 * 1) / (32 + 4)
    assert division.share("embedding") == 1 / 8
    assert Division(8, 32, 2, replicated_embedding=True).share("embedding") == 1


@by_table("heads", "kv_heads", "ranks", "divisible")
def test_heads_are_divided_and_those_of_keys_divided_or_repeated(
    heads: int | None, kv_heads: int | None, ranks: int, divisible: bool
) -> None:
    assert (indivisible_heads(heads, kv_heads, ranks) is None) is divisible


def test_tensors_are_summed_by_what_decides_their_division() -> None:
    tensors = [
        WeightTensor("model.layers.0.mlp.up_proj.weight", "BF16", (8, 4)),
        WeightTensor("model.layers.0.mlp.down_proj.weight", "BF16", (4, 8)),
        WeightTensor("model.layers.0.mlp.down_proj.weight_scale_inv", "F32", (1, 1)),
        WeightTensor("model.layers.1.mlp.down_proj.qweight", "I32", (4, 1)),
        WeightTensor("model.layers.1.input_layernorm.weight", "BF16", (4,)),
        WeightTensor("lm_head.weight", "BF16", (10, 4)),
        WeightTensor("model.projection.weight", "BF16", (3, 4)),
        WeightTensor("model.layers.1.mlp.experts.0.bias", "BF16", (6,)),
        WeightTensor("model.layers.1.attn.qkv_proj.weight", "BF16", (5, 4)),
    ]
    assert set(parts_of(tensors, 2)) == {
        Part("matrix", 0, "BF16", True, 64, 128),
        Part("matrix", 0, "F32", False, 1, 4),
        Part("matrix", 1, "I32", False, 4, 16),
        Part("replicated", 1, "BF16", False, 4, 8),
        Part("head", None, "BF16", False, 40, 80),
        Part("matrix", None, "BF16", False, 12, 24),
        Part("expert", 1, "BF16", False, 6, 12),
        Part("fused", 1, "BF16", True, 20, 40),
    }


@by_table("name")
def test_what_an_engine_computes_or_does_not_load_is_left_out(name: str) -> None:
    assert parts_of([WeightTensor(name, "F16", (4, 4))], 2) == ()


def test_the_first_pipeline_stages_have_the_layers_that_are_left_over() -> None:
    assert [stage_of(layer, 5, 3) for layer in range(5)] == [0, 0, 1, 1, 2]
    assert [stage_of(layer, 4, 2) for layer in range(4)] == [0, 0, 1, 1]
    assert [stage_of(layer, 2, 4) for layer in range(2)] == [0, 1]
    assert [stage_of(layer, 6, 4) for layer in range(6)] == [0, 0, 1, 1, 2, 3]
