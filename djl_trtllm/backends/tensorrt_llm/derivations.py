"""Arguments of TensorRT-LLM that are computed from several options, the model and the machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from packaging.version import Version

from djl_trtllm.backends.effects import Target
from djl_trtllm.backends.tensorrt_llm.arguments import ArgumentBuilder, Phase, PlanInputs
from djl_trtllm.backends.tensorrt_llm.quantization import kv_cache_format, quantization
from djl_trtllm.config import Backend
from djl_trtllm.config.options.choices import GuidedDecoding, KvCacheType
from djl_trtllm.engines.hardware import release_of
from djl_trtllm.sizing.configured import FREE_MEMORY_FRACTION

_GUIDES_OVERLAPPED = Version("1.1.0rc0")
_DYNAMIC_BATCH = {
    "enable_batch_size_tuning": True,
    "enable_max_num_tokens_tuning": False,
    "dynamic_batch_moving_average_window": 128,
}
_KNOBS = "ExtendedRuntimePerfKnobConfig"
_CUDA_GRAPHS = ("cuda_graph_batch_sizes", "cuda_graph_max_batch_size", "cuda_graph_padding_enabled")
_NOT_AUTODEPLOYS = (
    "pipeline_parallel_degree",
    "context_parallel_size",
    "moe_tensor_parallel_size",
    "moe_expert_parallel_size",
    "moe_cluster_parallel_size",
    "enable_attention_dp",
    "gpus_per_node",
    "pp_partition",
)


def derive(builder: ArgumentBuilder) -> None:
    for derivation in _DERIVATIONS:
        derivation(builder)


def _limits(builder: ArgumentBuilder) -> None:
    inputs, options = builder.inputs, builder.options
    sequences = ("max_rolling_batch_size", "max_num_sequences")
    lengths = ("max_seq_len", "max_output_len")
    builder.put(Target("BuildConfig", "max_batch_size"), inputs.max_batch_size, *sequences)
    builder.put(Target("BuildConfig", "max_seq_len"), inputs.max_seq_len, *lengths)
    builder.put(Target("BuildConfig", "max_num_tokens"), inputs.max_num_tokens, "max_num_tokens")
    longest_prompt = min(options.max_input_len, inputs.max_seq_len)
    builder.put(Target("BuildConfig", "max_input_len"), longest_prompt, "max_input_len")
    builder.put(Target("LLM", "max_batch_size"), inputs.max_sequences, *sequences)
    builder.put(Target("LLM", "max_num_tokens"), inputs.max_num_tokens, "max_num_tokens")
    if inputs.backend is not Backend.TENSORRT:
        if options.max_beam_width > inputs.max_sequences:
            builder.problems.append(
                f"{builder.format_setting('max_beam_width')}: every request of the {inputs.backend} backend has that "
                f"many beams, and {inputs.max_sequences} sequences run together; raise option.max_rolling_batch_size"
            )
        # An engine has its own lengths, and warns of others.
        builder.put(Target("LLM", "max_seq_len"), inputs.max_seq_len, *lengths)
        builder.put_unless_default(Target("LLM", "max_input_len"), longest_prompt, "max_input_len")


def _parallelism(builder: ArgumentBuilder) -> None:
    inputs = builder.inputs
    if inputs.backend is Backend.AUTODEPLOY:
        _world_size(builder)
        return
    partition = builder.options.pp_partition
    if partition is not None and inputs.backend is Backend.PYTORCH and len(partition) != inputs.pipeline_parallel:
        builder.problems.append(
            f"{builder.format_setting('pp_partition')}: {len(partition)} numbers of layers for "
            f"{inputs.pipeline_parallel} groups; give one for each group of option.pipeline_parallel_degree"
        )
    for target, degree, option in (
        (Target("LLM", "tensor_parallel_size"), inputs.tensor_parallel, "tensor_parallel_degree"),
        (Target("LLM", "pipeline_parallel_size"), inputs.pipeline_parallel, "pipeline_parallel_degree"),
    ):
        if degree > 1 or target in builder:
            builder.put(target, degree, option)


def _world_size(builder: ArgumentBuilder) -> None:
    """AutoDeploy distributes a model itself, over the given number of GPUs."""
    builder.drop(Target("LLM", "tensor_parallel_size"))
    if builder.inputs.tensor_parallel > 1:
        builder.put(Target("LLM", "world_size"), builder.inputs.tensor_parallel, "tensor_parallel_degree")
    builder.problems += [
        f"{builder.format_setting(name)}: AutoDeploy distributes a model by option.tensor_parallel_degree only; leave "
        f"it out"
        for name in _NOT_AUTODEPLOYS
        if builder.config.is_set(name)
    ]


def _kv_cache(builder: ArgumentBuilder) -> None:
    options = builder.options
    fraction = options.kv_cache_free_gpu_mem_fraction
    builder.put_unless_default(
        Target("KvCacheConfig", "free_gpu_memory_fraction"),
        FREE_MEMORY_FRACTION if fraction is None else fraction,
        "kv_cache_free_gpu_mem_fraction",
    )
    builder.put_unless_default(
        Target("KvCacheConfig", "enable_block_reuse"), options.enable_kv_cache_reuse, "enable_kv_cache_reuse"
    )
    if builder.is_taken(tokens_per_block := Target("KvCacheConfig", "tokens_per_block")):
        # Those of an engine are what it was compiled with.
        builder.drop(tokens_per_block)
        builder.put_unless_default(tokens_per_block, builder.inputs.tokens_per_block, "tokens_per_block")
    kv_cache_format(builder)


def _kv_cache_type(builder: ArgumentBuilder) -> None:
    options, target = builder.options, Target("BuildConfig", "kv_cache_type")
    if not builder.config.is_set("paged_kv_cache"):
        return
    paged = options.kv_cache_type in (None, KvCacheType.PAGED)
    if options.kv_cache_type is not None and paged != options.paged_kv_cache:
        builder.problems.append(
            f"{builder.format_setting('paged_kv_cache')} and {builder.format_setting('kv_cache_type')} contradict "
            "each other: leave one of them out"
        )
    elif options.kv_cache_type is None:
        kind = KvCacheType.PAGED if options.paged_kv_cache else KvCacheType.CONTINUOUS
        builder.put(target, kind, "paged_kv_cache")


def _paged_context(builder: ArgumentBuilder) -> None:
    """Reused blocks and chunked prompts need attention kernels that read prompts from the paged cache."""
    options = builder.options
    if builder.inputs.backend is not Backend.TENSORRT or options.use_paged_context_fmha:
        return
    for name in ("enable_kv_cache_reuse", "enable_chunked_prefill"):
        if getattr(options, name):
            builder.problems.append(
                f"{builder.format_setting(name)} needs an engine with option.use_paged_context_fmha, and "
                f"{builder.format_setting('use_paged_context_fmha')}: leave that out"
            )


def _scheduler(builder: ArgumentBuilder) -> None:
    options = builder.options
    if any(Target("DynamicBatchConfig", name) in builder for name in _DYNAMIC_BATCH):
        for name, value in _DYNAMIC_BATCH.items():
            if Target("DynamicBatchConfig", name) not in builder:
                builder.put(Target("DynamicBatchConfig", name), value)
    if options.enable_overlap_scheduler is not None and builder.inputs.backend is not Backend.TENSORRT:
        builder.put(
            Target("LLM", "disable_overlap_scheduler"), not options.enable_overlap_scheduler, "enable_overlap_scheduler"
        )


def _knobs(builder: ArgumentBuilder) -> None:
    """Runtime switches of an engine: their own options override the JSON object."""
    options = builder.options
    if builder.inputs.backend is not Backend.TENSORRT:
        return
    for name, value in _knob_object(builder).items():
        if Target(_KNOBS, name) not in builder:
            builder.put(Target(_KNOBS, name), value, "extended_runtime_perf_knob_config")
    if options.enforce_eager and not builder.config.is_set("cuda_graph_mode"):
        builder.put(Target(_KNOBS, "cuda_graph_mode"), False, "enforce_eager")


def _knob_object(builder: ArgumentBuilder) -> dict[str, Any]:
    text = builder.options.extended_runtime_perf_knob_config
    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, bool | int])
    except msgspec.DecodeError as error:
        builder.problems.append(
            f"{builder.format_setting('extended_runtime_perf_knob_config')}: expected a JSON object of switches and "
            f'numbers, such as {{"cuda_graph_mode": true}} ({error})'
        )
        return {}


def _cuda_graphs(builder: ArgumentBuilder) -> None:
    options, config = builder.options, builder.config
    target = Target("LLM", "cuda_graph_config")
    if builder.inputs.backend is Backend.TENSORRT:
        return
    chosen = [name for name in _CUDA_GRAPHS if config.is_set(name)]
    wanted = not options.enforce_eager if options.use_cuda_graph is None else options.use_cuda_graph
    if not wanted:
        switch = "enforce_eager" if options.use_cuda_graph is None else "use_cuda_graph"
        builder.problems += [
            f"{builder.format_setting(name)} and {builder.format_setting(switch)} contradict each other: leave one of "
            f"them out"
            for name in chosen
        ]
        builder.put(target, None, switch)
    elif options.cuda_graph_batch_sizes is not None and options.cuda_graph_max_batch_size is not None:
        builder.problems.append(
            f"{builder.format_setting('cuda_graph_batch_sizes')} and "
            f"{builder.format_setting('cuda_graph_max_batch_size')}: "
            "TensorRT-LLM takes either the batches or the largest of them; leave one out"
        )
    elif options.use_cuda_graph and not chosen:
        builder.put(target, {"class": "CudaGraphConfig"}, "use_cuda_graph")


def _guided_decoding(builder: ArgumentBuilder) -> None:
    options, target = builder.options, Target("LLM", "guided_decoding_backend")
    engine = builder.inputs.backend is Backend.TENSORRT
    if engine and options.guided_decoding_backend is GuidedDecoding.LLGUIDANCE:
        builder.problems.append(
            f"{builder.format_setting('guided_decoding_backend')}: a compiled engine has xgrammar only; llguidance is "
            "the PyTorch backend's"
        )
    elif _guides_by_default(builder.inputs) and not builder.config.is_set("guided_decoding_backend"):
        builder.put(target, GuidedDecoding.XGRAMMAR)


def _guides_by_default(inputs: PlanInputs) -> bool:
    """Not all versions of AutoDeploy have guides; PyTorch 1.0 has them only without its overlap scheduler."""
    if inputs.backend is Backend.PYTORCH:
        release = release_of(inputs.version)
        return release is None or release >= _GUIDES_OVERLAPPED
    return inputs.backend is Backend.TENSORRT


def _lora(builder: ArgumentBuilder) -> None:
    options = builder.options
    if not options.enable_lora:
        return
    if builder.inputs.backend is Backend.TENSORRT:
        building = Phase.BUILD in builder.phases
        if building and options.lora_target_modules is None and options.lora_dir is None:
            builder.problems.append(
                f"{builder.format_setting('enable_lora')}: a compiled engine must know which modules adapters change: "
                "set option.lora_target_modules (such as attn_q,attn_k,attn_v), or option.lora_dir to an adapter"
            )
    builder.put(Target("LoraConfig", "max_lora_rank"), options.max_lora_rank, "max_lora_rank")
    if options.lora_dir is not None:
        builder.put(Target("LoraConfig", "lora_dir"), [options.lora_dir], "lora_dir")


def _files(builder: ArgumentBuilder) -> None:
    """The compiler runs in the engine's directory, so paths of files that it reads must be absolute."""
    cache = builder.options.input_timing_cache
    if cache is not None:
        builder.put(Target("BuildConfig", "input_timing_cache"), cache.absolute(), "input_timing_cache")


_DERIVATIONS: tuple[Callable[[ArgumentBuilder], None], ...] = (
    _limits,
    _parallelism,
    quantization,
    _kv_cache,
    _kv_cache_type,
    _paged_context,
    _scheduler,
    _knobs,
    _cuda_graphs,
    _guided_decoding,
    _lora,
    _files,
)
