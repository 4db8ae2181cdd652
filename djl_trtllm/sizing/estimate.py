"""How much of a GPU's memory a model takes, and how many tokens fit into the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.sharding import Division, group_of, layer_of
from djl_trtllm.sizing.tensors import FLOATS, OF_TORCH

GIB = 1 << 30
MIB = 1 << 20
MOST = 16_384
"""The recommended max_num_tokens is at most this: more does not make an engine faster (docs/sizing.md)."""


@dataclass(frozen=True)
class Conditions:
    """Where and how a model runs. `gpu_memory` is in bytes, of one GPU, as NVML reports it."""

    gpu_memory: int
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    dtype: str | None = None
    """Type of unquantised weights, `bfloat16`; None: the checkpoint's."""
    quantization: str | None = None
    """Applied while the model is compiled: a value of option.quantize or a name of TensorRT-LLM. None: as stored."""
    kv_dtype: str | None = None
    """fp8, int8, nvfp4, bfloat16, ...; None: the weights' type."""
    fraction: float = 0.9
    """Of the memory that weights, activations and buffers leave, for the KV cache."""
    max_batch_size: int = 256
    max_input_len: int | None = None
    max_output_len: int | None = None
    max_beam_width: int = 1
    backend: Literal["tensorrt", "pytorch"] = "tensorrt"


@dataclass(frozen=True)
class Estimate:
    """Bytes are per rank, of the rank with most to hold."""

    sizes: CheckpointSizes
    conditions: Conditions

    @cached_property
    def weights(self) -> int:
        wanted = OF_TORCH.get(self.conditions.dtype or "")
        shape = self.sizes.shape
        division = Division(
            self.conditions.tensor_parallel,
            shape.num_heads or 0,
            shape.num_kv_heads or 0,
            self.conditions.backend == "tensorrt",
        )
        stages = [0.0] * self.conditions.pipeline_parallel
        layers = max(1, shape.num_layers or 1)
        for tensor in self.sizes.tensors:
            group, layer = group_of(tensor), layer_of(tensor)
            size = tensor.bytes
            if wanted and tensor.dtype in FLOATS:
                size = tensor.elements * (4 if wanted == "F32" else 2)
            stage = len(stages) - 1 if group == "head" else 0
            if layer is not None:
                stage = min(len(stages) - 1, layer * len(stages) // layers)
            stages[stage] += size * division.part(group)
        return int(max(stages))

    @cached_property
    def communication(self) -> int:
        # NCCL's buffers (AIConfigurator 0.12, systems/*.yaml).
        ranks = self.conditions.tensor_parallel * self.conditions.pipeline_parallel
        return 0 if ranks == 1 else (342 if ranks == 2 else 392) * MIB

    @cached_property
    def overhead(self) -> int:
        return 1 * GIB

    @cached_property
    def kv_bytes_per_token(self) -> int:
        bits = {"fp8": 8, "int8": 8, "nvfp4": 4.5, "float32": 32, "fp32": 32}.get(self.conditions.kv_dtype or "", 16)
        layers = self.sizes.layers
        stages = self.conditions.pipeline_parallel
        size = -(-len(layers) // stages) if layers else 1
        most = max(
            (
                sum(layer.per_token(self.conditions.tensor_parallel) for layer in layers[start : start + size])
                for start in range(0, len(layers), size)
            ),
            default=0,
        )
        return int(most * bits / 8)

    def activations(self, max_num_tokens: int) -> int:
        shape, ranks = self.sizes.shape, self.conditions.tensor_parallel
        hidden, inner = shape.hidden or 0, shape.intermediate or 4 * (shape.hidden or 0)
        heads = (shape.num_heads or 0) + 2 * (shape.num_kv_heads or 0)
        per_token = 2 * (2 * inner / ranks + 4 * hidden + heads * (shape.head_dim or 0) / ranks)
        return int(2.3 * per_token * max_num_tokens)

    def kv_tokens(self, max_num_tokens: int) -> int:
        """Tokens that the KV cache holds beside an engine of `max_num_tokens`; 0 if nothing is left."""
        used = self.weights + self.communication + self.overhead + self.activations(max_num_tokens)
        left = self.conditions.gpu_memory - used
        if left <= 0 or not self.kv_bytes_per_token:
            return 0
        return int(left * self.conditions.fraction) // self.kv_bytes_per_token

    @cached_property
    def max_num_tokens(self) -> int:
        """The largest max_num_tokens beside which a sequence of as many tokens fits; 0: out of memory."""
        low, high = 0, 1 << 24
        while low < high:
            middle = (low + high + 1) // 2
            if self.kv_tokens(middle) >= self.longest(middle):
                low = middle
            else:
                high = middle - 1
        return low

    def longest(self, max_num_tokens: int) -> int:
        """Tokens of the longest sequence, with the widened limits where none are given."""
        limit = min(4096, max_num_tokens)
        return (self.conditions.max_input_len or limit) + (self.conditions.max_output_len or limit)

    @property
    def recommended(self) -> int:
        """Half of the maximum, at most 16,384: the other half is for the KV cache."""
        return min(self.max_num_tokens // 2, MOST)

    def sequences_of(self, length: int, max_num_tokens: int | None = None) -> int:
        """Sequences of `length` tokens that the KV cache holds at a time."""
        return self.kv_tokens(self.recommended if max_num_tokens is None else max_num_tokens) // max(1, length)

    @property
    def limits(self) -> Mapping[str, int]:
        """The limits that the engine is built with, as the finder document widens them."""
        limit = min(4096, self.recommended)
        return {
            "max_num_tokens": self.recommended,
            "max_input_len": max(limit, self.conditions.max_input_len or 0),
            "max_output_len": max(limit, self.conditions.max_output_len or 0),
            "max_rolling_batch_size": self.conditions.max_batch_size,
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        if self.max_num_tokens:
            return ()
        needed = self.weights + self.communication + self.overhead
        return (
            f"{self.sizes.source} does not fit: {needed / GIB:.1f} GiB of weights and overhead on each of "
            f"{self.conditions.tensor_parallel * self.conditions.pipeline_parallel} GPUs with "
            f"{self.conditions.gpu_memory / GIB:.1f} GiB; raise option.tensor_parallel_degree or quantise the model",
        )


def estimate(sizes: CheckpointSizes, conditions: Conditions) -> Estimate:
    return Estimate(sizes, conditions)
