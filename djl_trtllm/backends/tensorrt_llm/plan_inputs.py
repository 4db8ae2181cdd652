"""What the arguments of TensorRT-LLM follow from beside the options: the version, lengths, GPUs."""

from __future__ import annotations

import os
from typing import Any

from djl_trtllm.backends.tensorrt_llm.arguments import PlanInputs
from djl_trtllm.backends.tensorrt_llm.built_engine import LAUNCHED
from djl_trtllm.backends.tensorrt_llm.names import has
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.format_setting import format_setting
from djl_trtllm.engines.hardware import Hardware, release_of
from djl_trtllm.engines.plan import planned_length, planned_sequences
from djl_trtllm.model import Layout, ModelKind, ModelShape
from djl_trtllm.sizing.configured import weight_dtype
from djl_trtllm.sizing.sharding import indivisible_heads

SUPPOSED_VERSION = "1.2.1"
"""The release that is planned for where none is known to be installed."""
_TOKENS_PER_ITERATION = 8192
_MANY_TOKENS_PER_ITERATION = 16384
_TOKENS_PER_BLOCK = 32


def plan_inputs(
    config: Config, layout: Layout, hardware: Hardware, backend: Backend, problems: list[str], notes: list[str]
) -> PlanInputs:
    """Derive them; adds to `problems` and `notes`."""
    options, shape = config.options, layout.shape
    tensor_parallel, pipeline_parallel = degrees(config, layout, hardware, problems)
    problems += _undivided(config, layout, backend, tensor_parallel)
    max_seq_len = planned_length(config, shape, notes)
    version = _version(hardware, notes)
    return PlanInputs(
        backend=backend,
        version=version,
        dtype=_dtype(config, shape, hardware, backend),
        stored_quantization=layout.quantization,
        max_sequences=planned_sequences(config),
        max_batch_size=options.max_num_sequences or options.max_rolling_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=_tokens_per_iteration(config, max_seq_len, notes),
        tokens_per_block=_tokens_per_block(config, backend, version),
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )


def _dtype(config: Config, shape: ModelShape, hardware: Hardware, backend: Backend) -> str | None:
    oldest = min((gpu.compute_capability for gpu in hardware.gpus if gpu.compute_capability), default=None)
    return weight_dtype(config, shape, oldest, compiled=backend is Backend.TENSORRT)


def _version(hardware: Hardware, notes: list[str]) -> str:
    if hardware.tensorrt_llm is not None and release_of(hardware.tensorrt_llm) is not None:
        return hardware.tensorrt_llm
    notes.append(f"the version of TensorRT-LLM is unknown: it gets the arguments of {SUPPOSED_VERSION}")
    return SUPPOSED_VERSION


def degrees(config: Config, layout: Layout, hardware: Hardware, problems: list[str]) -> tuple[int, int]:
    """GPUs over which each layer is split, and groups of GPUs over which layers are spread."""
    options = config.options
    context = options.context_parallel_size
    launched = os.environ.get(LAUNCHED) == "1"
    nodes = max(options.num_nodes, options.cluster_size or 1)
    here = len(hardware.gpus) * (nodes if launched else 1)
    pipeline = _degree(config, "pipeline_parallel_degree", layout, layout.pipeline_parallel, problems)
    tensor = _degree(config, "tensor_parallel_degree", layout, layout.tensor_parallel, problems)
    if tensor == "max":
        tensor = max(1, here // (pipeline * context))
    needed = tensor * pipeline * context
    unknown = launched and nodes == 1  # how many GPUs the other machines have
    # Of an engine `check_built_engine` compares all of this.
    if needed > here and not unknown and not layout.kind.is_engine:
        asked = [
            format_setting(config, name)
            for name in ("tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_size")
            if config.is_set(name)
        ]
        problems.append(
            f"{' and '.join(asked) or layout.path} need{'' if len(asked) > 1 else 's'} {needed} GPUs, and {here} can "
            "be used here; with GPUs of several machines, start the server with trtllm-llmapi-launch"
        )
    return tensor, pipeline


def _degree(config: Config, name: str, layout: Layout, degree: int | None, problems: list[str]) -> Any:
    """The option's degree, or that of TensorRT-LLM's own files, which are split already."""
    value = getattr(config.options, name)
    if degree is None:
        return value
    if layout.kind.is_engine:
        return degree
    if config.is_set(name) and value not in ("max", degree):
        problems.append(f"{format_setting(config, name)}: the checkpoint is converted for {degree}")
    return degree


def _undivided(config: Config, layout: Layout, backend: Backend, degree: int) -> list[str]:
    """What of a checkpoint cannot be split over this number of GPUs; AutoDeploy leaves such layers whole."""
    whole = backend is Backend.PYTORCH and config.options.enable_attention_dp
    if whole or backend is Backend.AUTODEPLOY or layout.kind is not ModelKind.HF_CHECKPOINT:
        return []
    problem = indivisible_heads(layout.shape.num_heads, layout.shape.num_kv_heads, degree)
    return [] if problem is None else [f"{format_setting(config, 'tensor_parallel_degree')}: {problem}"]


def _tokens_per_block(config: Config, backend: Backend, version: str) -> int:
    settable = backend is Backend.TENSORRT or has("KvCacheConfig", "tokens_per_block", version)
    return config.options.tokens_per_block if settable else _TOKENS_PER_BLOCK


def _tokens_per_iteration(config: Config, max_seq_len: int, notes: list[str]) -> int:
    """`option.max_num_tokens`, which `memory` sets where the memory of the GPUs is known, else what the batch can use
    of TensorRT-LLM's own default, and one prompt at least."""
    options = config.options
    if options.max_num_tokens is not None:
        return options.max_num_tokens
    sequences = options.max_num_sequences or options.max_rolling_batch_size
    tokens = max(min(_TOKENS_PER_ITERATION, sequences * max_seq_len), sequences * options.max_beam_width)
    longest_prompt = min(options.max_input_len, max_seq_len)
    if options.enable_chunked_prefill or longest_prompt <= tokens:
        return tokens
    if longest_prompt > _MANY_TOKENS_PER_ITERATION:
        notes.append(
            f"an iteration holds {longest_prompt} tokens, because prompts may be so long and are not split: that takes "
            "memory from the KV cache; set option.enable_chunked_prefill=true to split them"
        )
    return longest_prompt
