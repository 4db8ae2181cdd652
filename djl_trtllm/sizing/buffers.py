"""Memory beside weights and KV cache: activations, logits, communication, and what the runtime itself takes.

Two engines differ much. TensorRT reserves activations for max_num_tokens when the engine is built; its constants are
fitted to half of LMI's measured tables (`check_tables`). PyTorch reuses them; its constants are AIConfigurator's for
TensorRT-LLM (0.12.0, ai-dynamo/aiconfigurator@095f58a51, sdk/backends and systems/*.yaml), which were measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions

MIB = 1 << 20
GIB = 1 << 30

_LEAST_ACTIVATIONS = 70 * MIB
_NCCL = MappingProxyType({1: 0, 2: 342 * MIB, 4: 392 * MIB, 8: 392 * MIB})

# Per token and hidden element, by tensor parallel degree.
_DENSE = MappingProxyType({1: 11.0, 2: 6.5, 4: 5.0, 8: 5.0})
_EXPERTS = MappingProxyType({1: 22.0, 2: 13.0, 4: 10.0, 8: 10.0})
_MOE_BLOCK = 128
_PYTORCH_OVERHEAD = 3 * GIB + 150 * MIB
"""AIConfigurator's 3.5 GiB are of a capacity of 80 GiB; of the 79.65 GiB that NVML reports it is this much."""
PYTORCH_RESERVED = 0.015
"""The part of the KV cache's memory that its allocator does not hand out (AIConfigurator)."""

_LOGITS_COPIES = 5
"""Of batch x vocabulary x 4 bytes: the engine's output, its copy for penalties, and the workspaces of top-k and top-p
(TensorRT-LLM 0.8, cpp/tensorrt_llm/layers/dynamicDecodeLayer.cpp and topPSamplingLayer.cu, `allocateBuffer`)."""


@dataclass(frozen=True)
class EngineConstants:
    """What is fitted for TensorRT engines. `scale` multiplies a token's live tensors; the others are bytes."""

    scale: float
    overhead: int
    eight_ranks: int
    """Communication of eight ranks and more."""


FITTED = EngineConstants(scale=2.4, overhead=int(2.5 * GIB), eight_ranks=int(2.75 * GIB))
"""By `python -m tools.sizing.fit`."""


def engine_activations_per_token(sizes: CheckpointSizes, tensor_parallel: int, scale: float) -> float:
    """Bytes per token of max_num_tokens: residuals on every rank, and the split parts of MLP and attention.

    A model with experts takes twice as much, and each expert that a token goes to has an MLP (AIConfigurator has the
    same factor).
    """
    shape = sizes.shape
    hidden, head_dim = shape.hidden or 0, shape.head_dim or 0
    inner = (shape.intermediate or 4 * hidden) / tensor_parallel * max(1, sizes.experts_per_token)
    keys = max(1.0, (shape.num_kv_heads or 0) / tensor_parallel)
    heads = (shape.num_heads or 0) / tensor_parallel + 2 * keys
    return scale * 2 * (2 * inner + 4 * hidden + heads * head_dim) * (2 if sizes.experts else 1)


def pytorch_activations(sizes: CheckpointSizes, tensor_parallel: int, tokens: int) -> int:
    shape = sizes.shape
    width = (shape.num_heads or 0) * (shape.head_dim or 0) or shape.hidden or 0
    table = _EXPERTS if sizes.experts else _DENSE
    size = 2 * tokens * width * table[_degree(tensor_parallel)]
    if sizes.experts:
        size += 4 * tokens * width * sizes.experts * sizes.experts_per_token / _MOE_BLOCK
    return max(int(size), _LEAST_ACTIVATIONS)


def logits(sizes: CheckpointSizes, conditions: Conditions) -> int:
    """Bytes of the buffers for the logits of a whole batch."""
    if conditions.backend == "pytorch":
        return 0  # part of what was measured
    rows = conditions.max_batch_size * conditions.max_beam_width
    return _LOGITS_COPIES * 4 * rows * (sizes.shape.vocab_size or 0)


def communication(conditions: Conditions, constants: EngineConstants = FITTED) -> int:
    if conditions.backend == "tensorrt" and conditions.tensor_parallel >= 8:
        return constants.eight_ranks
    return _NCCL[_degree(max(conditions.tensor_parallel, min(2, conditions.ranks)))]


def overhead(conditions: Conditions, constants: EngineConstants = FITTED) -> int:
    """What driver, CUDA, libraries and runtime take of each GPU."""
    return constants.overhead if conditions.backend == "tensorrt" else _PYTORCH_OVERHEAD


def _degree(tensor_parallel: int) -> int:
    """The measured degree at or below this one."""
    return max(degree for degree in _NCCL if degree <= tensor_parallel)
