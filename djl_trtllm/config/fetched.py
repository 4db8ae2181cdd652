"""What the configuration in a fetched repository may set: a list, so that a new option is not on it by itself.

The owner of a repository on the hub or in S3 may say how its model runs. Files and addresses of this machine,
its caches and secrets, and permissions are the operator's: set them in the environment or on the command line.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from djl_trtllm.config.options.registry import OPTIONS, find
from djl_trtllm.config.sources.environment import variables_of
from djl_trtllm.config.sources.properties import Setting, Source

MAY_SET = frozenset({
    "revision", "model_name", "backend", "tokenizer_revision", "load_format", "dtype", "max_input_len",
    "max_output_len", "max_seq_len", "max_num_tokens", "strict_memory", "max_rolling_batch_size",
    "max_num_sequences", "tokens_per_block", "kv_cache_free_gpu_mem_fraction", "max_tokens_in_paged_kv_cache",
    "enable_kv_cache_reuse", "kv_cache_dtype", "max_attention_window", "sink_token_length", "host_cache_size",
    "onboard_blocks", "secondary_offload_min_priority", "event_buffer_max_size", "enable_partial_reuse",
    "copy_on_partial_reuse", "use_uvm", "max_gpu_total_bytes", "attention_dp_events_gather_period_ms",
    "mamba_ssm_cache_dtype", "fail_fast_on_attention_window_too_large", "kv_cache_type", "paged_kv_cache",
    "batch_scheduler_policy", "context_chunking_policy", "enable_chunked_prefill", "batching_type",
    "enable_overlap_scheduler", "disable_overlap_scheduler", "enable_batch_size_tuning",
    "enable_max_num_tokens_tuning", "dynamic_batch_moving_average_window", "stream_interval",
    "batch_wait_timeout_ms", "batch_wait_timeout_iters", "batch_wait_max_tokens_ratio", "tensor_parallel_degree",
    "pipeline_parallel_degree", "pp_partition", "context_parallel_size", "moe_tensor_parallel_size",
    "moe_expert_parallel_size", "moe_cluster_parallel_size", "enable_attention_dp", "enable_lm_head_tp_in_adp",
    "embedding_parallel_mode", "allreduce_strategy", "gpus_per_node", "num_nodes", "cluster_size",
    "inference_num_threads", "script", "opt_num_tokens", "opt_batch_size", "max_encoder_input_len",
    "max_prompt_embedding_table_size", "gather_context_logits", "gather_generation_logits",
    "gather_all_token_logits", "strongly_typed", "force_num_profiles", "profiling_verbosity", "enable_debug_output",
    "use_refit", "weight_sparsity", "weight_streaming", "use_strip_plan", "monitor_memory", "fast_build",
    "enable_tqdm", "gpt_attention_plugin", "gemm_plugin", "lora_plugin", "moe_plugin", "nccl_plugin",
    "gemm_swiglu_plugin", "remove_input_padding", "context_fmha", "context_fmha_fp32_acc", "use_paged_context_fmha",
    "use_fp8_context_fmha", "multi_block_mode", "use_fused_mlp", "multiple_profiles", "reduce_fusion",
    "user_buffer", "streamingllm", "extended_runtime_perf_knob_config", "cuda_graph_mode", "cuda_graph_cache_size",
    "quantize", "smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel", "awq_format",
    "awq_block_size", "calib_size", "calib_batch_size", "calib_batches", "calib_max_seq_length",
    "tokenizer_max_seq_length", "random_seed", "calib_device", "quant_algo", "kv_cache_quant_algo", "clamp_val",
    "use_meta_recipe", "has_zero_point", "pre_quant_scale", "exclude_modules", "force_dynamic_quantization",
    "chatglm_model_version", "gpt_model_version", "rotary_base", "rotary_dim", "rotary_scaling_type",
    "rotary_scaling_factor", "max_beam_width", "normalize_log_probs", "guided_decoding_backend", "stop_in_engine",
    "sampler_type", "ignored_seed", "attn_backend", "moe_backend", "use_cuda_graph", "enforce_eager",
    "cuda_graph_batch_sizes", "cuda_graph_max_batch_size", "cuda_graph_padding_enabled", "enable_autotuner",
    "enable_min_latency", "enable_iter_perf_stats", "enable_iter_req_stats", "print_iter_log",
    "perf_metrics_max_requests", "garbage_collection_gen0_threshold", "checkpoint_format", "enable_fullgraph",
    "enable_inductor", "enable_piecewise_cuda_graph", "disable_flashinfer_sampling", "max_stats_len",
    "iter_stats_max_iterations", "request_stats_max_iterations", "return_perf_metrics", "orchestrator_type",
    "enable_lora", "max_lora_rank", "lora_ckpt_source", "lora_target_modules", "lora_cache_optimal_adapter_size",
    "lora_cache_max_adapter_size", "lora_cache_gpu_memory_fraction", "lora_cache_host_memory_bytes",
    "job_queue_size", "predict_timeout", "model_loading_timeout", "stream_write_timeout", "executor_hang_timeout",
    "retry_threshold", "resume_after_restart", "output_formatter", "tool_call_parser", "reasoning_parser",
    "tgi_compat", "bedrock_compat", "unknown_parameters", "strict", "decoupled",
})  # fmt: skip
"""Options by their names in `Options`. Those without effect may be written too."""

WITHIN = frozenset({"model_id", "tokenizer"})
"""Options that may name a folder of the repository itself, or another repository, and nothing else of this machine."""


def within_bounds(source: Source, model: str) -> Source:
    """The source, a file of the fetched `model`, without what it may not set, and a warning of each such setting."""
    kept = tuple(setting for setting in source.settings if _may_set(setting))
    warnings = tuple(_ignored(setting, model) for setting in source.settings if setting not in kept)
    return replace(source, settings=kept, warnings=(*source.warnings, *warnings))


def _ignored(setting: Setting, model: str) -> str:
    declared = find(setting.key)
    variable = variables_of(setting.key if declared is None else declared.key)[0]
    return (
        f"{setting.formatted} is ignored: {model} was fetched, and its own files may set only what "
        f"docs/fetched-models.md lists; if you want it, set {variable} in the environment"
    )


def _may_set(setting: Setting) -> bool:
    declared = find(setting.key)
    if declared is None or declared.option.legacy:
        return True  # it has no effect
    if declared.name in WITHIN:
        path = Path(setting.value.strip())
        return (
            not path.is_absolute() and ".." not in path.parts and not setting.value.strip().startswith(("~", "file:"))
        )
    return declared.name in MAY_SET


def listed() -> list[str]:
    """The keys of the options in the order of their groups, for the documents."""
    return [declared.key for name, declared in OPTIONS.items() if name in MAY_SET or name in WITHIN]
