"""What the estimate has to know of a configuration."""

from __future__ import annotations

from dataclasses import replace

from djl_trtllm.config import Config, DType, KvCacheDType
from djl_trtllm.model.shape import ModelShape
from djl_trtllm.sizing.conditions import Conditions, LoraSlots

FREE_MEMORY_FRACTION = 0.95
"""Of the memory that the loaded model leaves, for the KV cache; without option.kv_cache_free_gpu_mem_fraction."""
_BFLOAT16_SINCE = (8, 0)
_DTYPES = {DType.FP32: "float32", DType.FP16: "float16", DType.BF16: "bfloat16"}


def conditions_of(
    config: Config,
    shape: ModelShape,
    *,
    gpu_memory: int,
    compute_capability: tuple[int, int] | None = None,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    compiled: bool = True,
) -> Conditions:
    """The conditions of a model with these options; `compiled` for an engine, false for PyTorch."""
    options = config.options
    longest = options.max_seq_len or options.max_input_len + options.max_output_len
    longest = min(longest, shape.max_position_embeddings or longest)
    longest_prompt = min(options.max_input_len, longest)
    quantization = options.quant_algo or options.quantize
    fraction = options.kv_cache_free_gpu_mem_fraction
    return Conditions(
        gpu_memory=gpu_memory,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        dtype=weight_dtype(config, shape, compute_capability, compiled=compiled),
        quantization=None if quantization is None else quantization.value,
        kv_dtype=_kv_dtype(config),
        fraction=FREE_MEMORY_FRACTION if fraction is None else fraction,
        max_batch_size=options.max_num_sequences or options.max_rolling_batch_size,
        max_input_len=longest_prompt,
        max_output_len=max(1, longest - longest_prompt),
        max_beam_width=options.max_beam_width,
        attention_windows=options.max_attention_window,
        lora=_lora(config),
        backend="tensorrt" if compiled else "pytorch",
    )


def weight_dtype(
    config: Config, shape: ModelShape, compute_capability: tuple[int, int] | None, *, compiled: bool
) -> str | None:
    """What TensorRT-LLM makes of `auto` when it loads: no bfloat16 on old GPUs, no engine in 32 bits."""
    if config.options.dtype is not DType.AUTO:
        return _DTYPES[config.options.dtype]
    if shape.dtype == "bfloat16" and (compute_capability or _BFLOAT16_SINCE) < _BFLOAT16_SINCE:
        return "float16"
    return "float16" if shape.dtype == "float32" and compiled else shape.dtype


def _kv_dtype(config: Config) -> str | None:
    options = config.options
    if options.kv_cache_quant_algo is not None:
        return options.kv_cache_quant_algo.value.lower()
    # Sixteen bits are the weights' own, whatever fp16 says.
    small = options.kv_cache_dtype in (KvCacheDType.FP8, KvCacheDType.INT8)
    return options.kv_cache_dtype.value if small else None


def _lora(config: Config) -> LoraSlots | None:
    options = config.options
    if not options.enable_lora:
        return None
    share = options.lora_cache_gpu_memory_fraction
    slots = LoraSlots(adapters=0, rank=options.max_lora_rank, free_share=share)
    return slots if options.lora_target_modules is None else replace(slots, modules=options.lora_target_modules)
