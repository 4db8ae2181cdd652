"""What an estimate gives reason to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from djl_trtllm.sizing.buffers import GIB
from djl_trtllm.sizing.kv_cache import model_windows
from djl_trtllm.sizing.sharding import indivisible_heads

if TYPE_CHECKING:
    from djl_trtllm.sizing.estimate import Estimate

_FEW_SEQUENCES = 32
_FEW_BYTES = 10 * GIB
_USUAL = 2048


def warnings_of(estimate: Estimate, max_num_tokens: int | None = None) -> tuple[str, ...]:
    """Sentences with numbers and what to do, the gravest first; `max_num_tokens` is the recommended one by default."""
    tokens = estimate.recommended if max_num_tokens is None else max_num_tokens
    sizes, conditions = estimate.sizes, estimate.conditions
    found = []
    if not estimate.max_num_tokens:
        found.append(_out_of_memory(estimate))
    elif tokens < (conditions.max_input_len or 0):
        found.append(
            f"max_num_tokens={tokens} is below the longest prompt of {conditions.max_input_len} tokens: "
            "set option.enable_chunked_prefill=true"
        )
    if problem := indivisible_heads(sizes.shape.num_heads, sizes.shape.num_kv_heads, conditions.tensor_parallel):
        found.append(problem)
    stages, layers = conditions.pipeline_parallel, sizes.shape.num_layers
    if layers and layers < stages:
        found.append(
            f"{layers} layers cannot be divided among {stages} groups of GPUs: set an option.pipeline_parallel_degree "
            f"of at most {layers}"
        )
    if sizes.quantization is not None and conditions.quantization is not None:
        found.append(
            f"the weights are stored as {sizes.quantization} already: option.quantize={conditions.quantization} is not "
            "counted"
        )
    if not sizes.exact:
        found.append("the weights were counted from config.json: their files are not known, or are not safetensors")
    if not sizes.parts:
        found.append("config.json does not give layers, heads and hidden size: no weights are counted")
    if estimate.max_num_tokens:
        found += _narrow(estimate, tokens)
    return tuple(found)


def _out_of_memory(estimate: Estimate) -> str:
    conditions = estimate.conditions
    parts = {
        "weights": estimate.weights,
        "logits": estimate.logits,
        "communication": estimate.communication,
        "runtime": estimate.overhead,
    }
    listed = ", ".join(f"{size / GIB:.1f} GiB of {name}" for name, size in parts.items() if size >= GIB / 20)
    return (
        f"{estimate.sizes.source} does not fit: {listed} on each of {conditions.ranks} GPUs with "
        f"{conditions.gpu_memory / GIB:.1f} GiB, and a KV cache for one sequence; raise option.tensor_parallel_degree, "
        "or quantise the weights (option.quantize)"
    )


def _narrow(estimate: Estimate, max_num_tokens: int) -> list[str]:
    found = []
    length = (estimate.conditions.max_input_len or _USUAL) + (estimate.conditions.max_output_len or _USUAL)
    cache, sequences = estimate.kv_bytes(max_num_tokens), estimate.sequences_of(length, max_num_tokens)
    if not sequences:
        found.append(
            f"the KV cache has {cache / GIB:.1f} GiB on each GPU, which does not hold one sequence of {length} tokens: "
            "lower option.max_num_tokens or the lengths, or use more GPUs"
        )
    elif cache < _FEW_BYTES and sequences < _FEW_SEQUENCES:
        found.append(
            f"the KV cache has {cache / GIB:.1f} GiB on each GPU, which is {sequences} sequences of {length} tokens: "
            "requests will wait; use more GPUs, or option.kv_cache_dtype=fp8 where the GPU has it"
        )
    windows = model_windows(estimate.sizes)
    if windows and estimate.conditions.attention_windows is None and length > max(windows):
        found.append(
            "some layers look back at a window only, and TensorRT-LLM keeps whole sequences for them unless "
            "option.max_attention_window says otherwise"
        )
    return found
