"""The engine settings that trtllm-bench chooses, by its heuristic.

The same numbers in the same order of operations as `calc_engine_setting` of TensorRT-LLM
(tensorrt_llm/bench/build/tuning.py at a7e572fb, 2026), so results are equal to the last bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.checkpoint import CheckpointSizes

_GIB = 1024**3
_BYTES = {"FP8": 1.0, "FP8_BLOCK_SCALES": 1.0, "NVFP4": 0.5}
"""Per weight and per element of the cache; everything else counts as 16 bits."""
_FRACTION = 0.95
_MOST_REQUESTS = 4096
_MOST_TOKENS = 32768
_LITTLE_CACHE = 10.0
_FEW_REQUESTS = 32


@dataclass(frozen=True)
class BenchModel:
    """What the heuristic knows of a model. `state_elements` are those of Mamba layers, per sequence."""

    parameters: int
    attention_layers: int
    kv_heads: int
    head_dim: int
    hybrid: bool = False
    state_elements: int = 0
    quantization: str | None = None
    kv_quantization: str | None = None

    @classmethod
    def of(
        cls, sizes: CheckpointSizes, quantization: str | None = None, kv_quantization: str | None = None
    ) -> BenchModel:
        """Only Nemotron-H counts as hybrid there. Raises SizingError if config.json lacks sizes."""
        shape = sizes.shape
        if not (shape.num_layers and shape.num_kv_heads and shape.head_dim):
            raise SizingError(f"{sizes.source}: config.json does not give layers, heads and their size")
        hybrid = shape.model_type == "nemotron_h"
        attending = sum(layer.kind == "attention" for layer in sizes.layers) if hybrid else shape.num_layers
        return cls(
            parameters=sizes.stored_parameters,
            attention_layers=attending,
            kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            hybrid=hybrid,
            state_elements=sum(layer.state_elements for layer in sizes.layers) if hybrid else 0,
            quantization=_upper(quantization or sizes.quantization),
            kv_quantization=_upper(kv_quantization or sizes.kv_quantization),
        )


@dataclass(frozen=True)
class BenchSettings:
    max_batch_size: int
    max_num_tokens: int
    kv_requests: float
    """Requests of input and output length that fit into the cache of all GPUs."""
    warnings: tuple[str, ...] = ()


def bench_settings(
    model: BenchModel,
    gpu_memory: int,
    input_len: int,
    output_len: int,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    fraction: float = _FRACTION,
) -> BenchSettings:
    """`gpu_memory` is one GPU's total in bytes. Raises SizingError if the model or one request does not fit."""
    if min(input_len, output_len, tensor_parallel, pipeline_parallel) < 1:
        raise SizingError("the heuristic of trtllm-bench needs an input and output length of at least 1")
    gpus = tensor_parallel * pipeline_parallel
    # Each GPU has at least one head.
    heads = max(tensor_parallel, model.kv_heads)
    element = _BYTES.get(model.kv_quantization or "", 2)
    per_token = 2 * model.attention_layers * heads * model.head_dim * element / _GIB
    weights = model.parameters * _BYTES.get(model.quantization or "", 2) / _GIB
    total = gpu_memory / _GIB * gpus
    cache = (total - weights) * (fraction**2 if model.hybrid else fraction)
    state = 2.0 * model.state_elements / _GIB
    requests = cache / (per_token * (input_len + output_len) + state)
    if total < weights:
        raise SizingError(
            f"the weights take {weights:.2f} GiB, and {gpus} GPUs have {total:.2f} GiB: use more GPUs, or quantise"
        )
    if requests < 1:
        raise SizingError(
            f"the KV cache does not hold one request of {input_len} + {output_len} tokens: use more GPUs, or quantise"
        )
    batch, tokens = _rounded(requests, input_len, output_len, pipeline_parallel, model.hybrid)
    warnings = []
    if cache / gpus < _LITTLE_CACHE:
        warnings.append(f"the KV cache has {cache / gpus:.1f} GiB per GPU, less than {_LITTLE_CACHE:.0f}")
    if requests < _FEW_REQUESTS:
        warnings.append(f"the KV cache holds {requests:.1f} requests, fewer than {_FEW_REQUESTS}")
    return BenchSettings(batch, tokens, requests, tuple(warnings))


def _rounded(requests: float, input_len: int, output_len: int, stages: int, hybrid: bool) -> tuple[int, int]:
    batch = min(requests, _MOST_REQUESTS) / stages
    tokens = min(batch * (1 + input_len / output_len), _MOST_TOKENS)
    if hybrid:
        size = 2 * math.floor(batch / 2)
    elif batch < 256:
        size = max(64, _up(batch, 32))
    else:
        size = _up(batch, 128 if batch < 1024 else 256)
    if tokens < 4096:
        return size, max(2048, _up(tokens, 256))
    return size, _up(tokens, 512 if tokens < 8192 else 1024)


def _up(value: float, step: int) -> int:
    return step * math.ceil(value / step)


def _upper(name: str | None) -> str | None:
    return None if name is None else name.upper()
