from __future__ import annotations

import re

import pytest

from djl_trtllm.config.options.choices import KvCacheDType, QuantAlgorithm, Quantization
from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.formats import WEIGHT_FORMATS, cache_bits, weight_bits


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp8", 8),
        ("FP8", 8),
        ("int8", 8),
        ("int4", 4),
        ("awq", 4.125),
        ("W4A16_GPTQ", 4.25),
        ("NVFP4", 4.5),
        ("none", 16),
        ("w4a8_awq", 4.125),
        ("smoothquant", 8),
        ("mxfp4", 4.25),
        ("gptq", 4.25),
        ("fp8_block", 8 + 32 / 128**2),
    ],
)
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


def test_the_cache_in_nvfp4_has_a_scale_per_16_elements() -> None:
    assert [cache_bits(name) for name in ("fp8", "int8", "nvfp4", "bfloat16", "fp32")] == [8, 8, 4.5, 16, 32]


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
