"""Bits per element of quantised weights and caches."""

from __future__ import annotations

import difflib
from types import MappingProxyType

from djl_trtllm.errors import SizingError

# A scale is spread over the weights that share it: AWQ and GPTQ have one of 16 bits per 128 weights (GPTQ a zero point
# too), NVFP4 one of 8 bits per 16, MXFP4 one of 8 bits per 32 (OCP Microscaling 1.0), FP8_BLOCK_SCALES one of 32 bits
# per 128 x 128. Scales per channel or tensor are too few to count: one per several thousand weights.
_WEIGHTS = {
    "NO_QUANT": 16.0,
    "W8A16": 8.0,
    "W4A16": 4.0,
    "W8A16_GPTQ": 8.25,
    "W4A16_GPTQ": 4.25,
    "W4A16_AWQ": 4.125,
    "W4A8_AWQ": 4.125,
    "W8A8_SQ_PER_CHANNEL": 8.0,
    "W8A8_SQ_PER_TENSOR_PLUGIN": 8.0,
    "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN": 8.0,
    "W8A8_SQ_PER_CHANNEL_PER_TENSOR_PLUGIN": 8.0,
    "W8A8_SQ_PER_TENSOR_PER_TOKEN_PLUGIN": 8.0,
    "W4A8_QSERVE_PER_GROUP": 4.125,
    "W4A8_QSERVE_PER_CHANNEL": 4.0,
    "FP8": 8.0,
    "FP8_PER_CHANNEL_PER_TOKEN": 8.0,
    "FP8_BLOCK_SCALES": 8.0 + 32 / 128**2,
    "INT8": 8.0,
    "MIXED_PRECISION": 8.0,
    "NVFP4": 4.5,
    "W4A8_NVFP4_FP8": 4.5,
    "W4A8_MXFP4_FP8": 4.25,
    "W4A8_MXFP4_MXFP8": 4.25,
    "W4A16_MXFP4": 4.25,
}
_OPTION_VALUES = {
    "none": "NO_QUANT",
    "int8": "W8A16",
    "int4": "W4A16",
    "awq": "W4A16_AWQ",
    "w4a8_awq": "W4A8_AWQ",
    "smoothquant": "W8A8_SQ_PER_CHANNEL",
    "fp8": "FP8",
    "nvfp4": "NVFP4",
    "mxfp4": "W4A16_MXFP4",
    "gptq": "W4A16_GPTQ",
    "fp8_block": "FP8_BLOCK_SCALES",
}
WEIGHT_FORMATS = MappingProxyType({name.lower(): bits for name, bits in _WEIGHTS.items()})
CACHE_FORMATS = MappingProxyType(
    {
        "fp8": 8.0,
        "int8": 8.0,
        "nvfp4": 4.5,
        "fp16": 16.0,
        "float16": 16.0,
        "bf16": 16.0,
        "bfloat16": 16.0,
        "fp32": 32.0,
        "float32": 32.0,
    }
)
"""Bits of an element of the KV cache. NVFP4 has a scale of 8 bits per 16 elements."""


def weight_bits(quantization: str) -> float:
    """Bits per weight of a matrix, by a value of option.quantize or a name of TensorRT-LLM. Raises SizingError."""
    text = quantization.lower()
    name = _OPTION_VALUES.get(text, text).lower()
    return _of(WEIGHT_FORMATS, name, quantization, "a quantisation", [*_OPTION_VALUES, *_WEIGHTS])


def cache_bits(dtype: str) -> float:
    """Bits per element of the KV cache. Raises SizingError for an unknown name."""
    return _of(CACHE_FORMATS, dtype.lower(), dtype, "a type of the KV cache", list(CACHE_FORMATS))


def _of(table: MappingProxyType[str, float], name: str, given: str, what: str, known: list[str]) -> float:
    if name in table:
        return table[name]
    near = difflib.get_close_matches(given, known, n=1)
    advice = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
    raise SizingError(f"{given}: expected {what}; {advice}")
