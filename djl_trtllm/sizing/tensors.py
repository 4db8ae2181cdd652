"""Sizes of tensors, with the names that safetensors gives to their types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from djl_trtllm.errors import LayoutError

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""https://github.com/huggingface/safetensors/blob/main/safetensors/src/tensor.rs"""

FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""Types of weights that are not quantised."""

OF_TORCH = {"bfloat16": "BF16", "float16": "F16", "half": "F16", "float32": "F32", "float": "F32", "float64": "F64"}
"""Names in config.json and options, as safetensors' names."""


@dataclass(frozen=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.elements * BITS[self.dtype] // 8)


def tensors_of(header: Mapping[str, Any], source: object) -> Iterable[Tensor]:
    """The tensors of a safetensors header. Raises LayoutError for a type or shape that the format does not have."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor = Tensor(name, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(
                f"{source}: the header describes {name!r} wrongly ({error}); copy the file again"
            ) from error
        if tensor.dtype not in BITS:
            raise LayoutError(f"{source}: {name} has the type {tensor.dtype!r}, expected one of {', '.join(BITS)}")
        yield tensor
