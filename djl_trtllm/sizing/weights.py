"""Bytes of the weights on each rank."""

from __future__ import annotations

from djl_trtllm.model.shape import ModelShape
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.conditions import Conditions, LoraSlots
from djl_trtllm.sizing.formats import WEIGHT_FORMATS, weight_bits
from djl_trtllm.sizing.sharding import Division, Part, stage_of
from djl_trtllm.sizing.tensors import BITS, FLOATS, OF_TORCH


def weights_by_stage(sizes: CheckpointSizes, conditions: Conditions) -> tuple[int, ...]:
    """Bytes of one rank of each pipeline stage.

    The embedding belongs to the first stage, the head to the last. TensorRT engines hold the embedding whole on each
    rank (`use_parallel_embedding` is off by default) and a second copy of it where the head is the embedding.
    """
    shape, stages = sizes.shape, conditions.pipeline_parallel
    engine = conditions.backend == "tensorrt"
    division = Division(conditions.tensor_parallel, shape.num_heads or 0, shape.num_kv_heads or 0, engine)
    bytes_ = [0.0] * stages
    for part in sizes.parts:
        size = _bytes(part, sizes, conditions)
        stage = 0 if part.layer is None else stage_of(part.layer, shape.num_layers or 1, stages)
        if part.group == "head":
            stage = stages - 1
        bytes_[stage] += size * division.share(part.group)
        if part.group == "embedding" and sizes.tied and (engine or stages > 1):
            bytes_[-1] += size * division.share("head")
    return tuple(-int(-size // 1) for size in bytes_)


def _bytes(part: Part, sizes: CheckpointSizes, conditions: Conditions) -> float:
    # Counted tensors are those of the model before it was quantised.
    applied = conditions.quantization if sizes.quantization is None else None if sizes.exact else sizes.quantization
    if part.quantisable and applied:
        bits = WEIGHT_FORMATS.get(applied.lower(), 16.0) if applied == sizes.quantization else weight_bits(applied)
        if bits < 16:
            return part.elements * bits / 8
    if part.dtype in FLOATS and (sizes.quantization is None or not sizes.exact):
        wanted = OF_TORCH.get(conditions.dtype or sizes.shape.dtype or "", part.dtype)
        return part.elements * BITS[wanted] / 8
    return part.bytes


def lora_bytes(shape: ModelShape, slots: LoraSlots | None, tensor_parallel: int, pipeline_parallel: int = 1) -> int:
    """Bytes of the adapters' matrices on one rank, in 16 bits: `rank` x (inputs + outputs) for each module."""
    if slots is None:
        return 0
    hidden, width = shape.hidden or 0, (shape.num_heads or 0) * (shape.head_dim or 0)
    keys, inner = (shape.num_kv_heads or 0) * (shape.head_dim or 0), shape.intermediate or 0
    # One of the two matrices is split like the module's weights, the other is whole.
    whole_and_split = {
        "attn_q": (hidden, width),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_qkv": (hidden, width + 2 * keys),
        "attn_dense": (hidden, width),
        "mlp_h_to_4h": (hidden, inner),
        "mlp_gate": (hidden, inner),
        "mlp_4h_to_h": (hidden, inner),
        "mlp_gate_up": (hidden, 2 * inner),
    }
    sums = [whole_and_split.get(module, (hidden, max(inner, width))) for module in slots.modules]
    per_layer = sum(whole + -(-split // tensor_parallel) for whole, split in sums)
    layers = -(-(shape.num_layers or 0) // pipeline_parallel)
    return 2 * slots.adapters * slots.rank * per_layer * layers
