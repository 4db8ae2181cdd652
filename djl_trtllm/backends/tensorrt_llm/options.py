"""What each option becomes on TensorRT-LLM, on its compiled engines and on its PyTorch backend.

An option that `fields` names *is* that argument of TensorRT-LLM: nothing else passes it on. Arguments that follow from
several options, or from model and machine, are computed in `derivations`.
"""

from __future__ import annotations

from djl_trtllm.backends.effects import Derived, Effects, bounded, derived, fields, fixed, needing, passed, without
from djl_trtllm.config.options.choices import BatchingType, KvCacheType

_SMOOTHQUANT = (
    "smoothquant_per_token and smoothquant_per_channel choose one of W8A8_SQ_PER_..._PLUGIN; with neither of them set "
    "it is W8A8_SQ_PER_CHANNEL"
)
_MODEL_VERSION = "it becomes the last part of the path, by which TensorRT-LLM knows the version"

_BOTH: Effects = {
    **fields(
        "LLM",
        "trust_remote_code",
        "load_format",
        "dtype",
        "enable_chunked_prefill",
        "context_parallel_size",
        "moe_tensor_parallel_size",
        "moe_expert_parallel_size",
        "moe_cluster_parallel_size",
        "enable_attention_dp",
        "enable_lm_head_tp_in_adp",
        "gpus_per_node",
        "gather_generation_logits",
        "guided_decoding_backend",
        "iter_stats_max_iterations",
        "request_stats_max_iterations",
        "return_perf_metrics",
        "orchestrator_type",
        "enable_lora",
        tensor_parallel_degree="tensor_parallel_size",
        pipeline_parallel_degree="pipeline_parallel_size",
    ),
    **fields(
        "KvCacheConfig",
        "max_attention_window",
        "sink_token_length",
        "host_cache_size",
        "onboard_blocks",
        "secondary_offload_min_priority",
        "event_buffer_max_size",
        "enable_partial_reuse",
        "copy_on_partial_reuse",
        "use_uvm",
        "max_gpu_total_bytes",
        "attention_dp_events_gather_period_ms",
        max_tokens_in_paged_kv_cache="max_tokens",
    ),
    **fields("SchedulerConfig", batch_scheduler_policy="capacity_scheduler_policy"),
    **needing("enable_chunked_prefill", True, fields("SchedulerConfig", "context_chunking_policy")),
    **needing(
        "enable_lora",
        True,
        {
            **fields("LoraConfig", "max_lora_rank", "lora_dir", "lora_ckpt_source", "lora_target_modules"),
            **fields(
                "PeftCacheConfig",
                lora_cache_optimal_adapter_size="optimal_adapter_size",
                lora_cache_max_adapter_size="max_adapter_size",
                lora_cache_gpu_memory_fraction="device_cache_percent",
                lora_cache_host_memory_bytes="host_cache_size",
            ),
        },
    ),
    "kv_cache_free_gpu_mem_fraction": derived("0.95 when not set", KvCacheConfig="free_gpu_memory_fraction"),
    **needing(
        "tensor_parallel_degree",
        "max",
        dict.fromkeys(("num_nodes", "cluster_size"), derived("GPUs of all machines", LLM="tensor_parallel_size")),
    ),
    "stop_in_engine": Derived("stop strings and stop ids go to the engine, or the server alone looks for them"),
    **without("the engine runs on the GPU", "inference_num_threads"),
}

_ENGINE: Effects = {
    **_BOTH,
    **fields(
        "BuildConfig",
        "max_seq_len",
        "kv_cache_type",
        "opt_num_tokens",
        "opt_batch_size",
        "max_encoder_input_len",
        "max_prompt_embedding_table_size",
        "gather_context_logits",
        "strongly_typed",
        "force_num_profiles",
        "profiling_verbosity",
        "enable_debug_output",
        "use_refit",
        "input_timing_cache",
        "output_timing_cache",
        "weight_sparsity",
        "weight_streaming",
        "use_strip_plan",
        "visualize_network",
        "monitor_memory",
        "max_beam_width",
    ),
    **fields(
        "LLM",
        "fail_fast_on_attention_window_too_large",
        "batching_type",
        "embedding_parallel_mode",
        "fast_build",
        "enable_tqdm",
        "normalize_log_probs",
    ),
    **fields(
        "DynamicBatchConfig",
        "enable_batch_size_tuning",
        "enable_max_num_tokens_tuning",
        "dynamic_batch_moving_average_window",
    ),
    **fields(
        "PluginConfig",
        "gpt_attention_plugin",
        "gemm_plugin",
        "lora_plugin",
        "moe_plugin",
        "nccl_plugin",
        "gemm_swiglu_plugin",
        "remove_input_padding",
        "context_fmha",
        "use_paged_context_fmha",
        "use_fp8_context_fmha",
        "multiple_profiles",
        "reduce_fusion",
        "user_buffer",
        "streamingllm",
    ),
    **fields(
        "ExtendedRuntimePerfKnobConfig",
        "cuda_graph_mode",
        "cuda_graph_cache_size",
        context_fmha_fp32_acc="enable_context_fmha_fp32_acc",
    ),
    **fields(
        "QuantConfig",
        "quant_algo",
        "kv_cache_quant_algo",
        "clamp_val",
        "use_meta_recipe",
        "has_zero_point",
        "pre_quant_scale",
        "exclude_modules",
        awq_block_size="group_size",
    ),
    **fields(
        "CalibConfig",
        "calib_batch_size",
        "calib_batches",
        "calib_dataset",
        "calib_max_seq_length",
        "tokenizer_max_seq_length",
        "random_seed",
        calib_device="device",
    ),
    "tokens_per_block": passed(PluginConfig="tokens_per_block", KvCacheConfig="tokens_per_block"),
    "max_num_tokens": passed(BuildConfig="max_num_tokens", LLM="max_num_tokens"),
    "gather_all_token_logits": passed(BuildConfig="gather_context_logits", LLM="gather_generation_logits"),
    "multi_block_mode": passed(ExtendedRuntimePerfKnobConfig="multi_block_mode", when_set=True),
    "use_fused_mlp": passed(PluginConfig="use_fused_mlp", when_set=True),
    "max_input_len": derived("also the limit at admission", BuildConfig="max_input_len"),
    "max_output_len": derived("max_input_len + max_output_len; also the limit at admission", BuildConfig="max_seq_len"),
    "max_rolling_batch_size": derived(
        "BuildConfig only where max_num_sequences is not set", LLM="max_batch_size", BuildConfig="max_batch_size"
    ),
    "max_num_sequences": derived(
        "LLM only where it is below max_rolling_batch_size", BuildConfig="max_batch_size", LLM="max_batch_size"
    ),
    "enable_kv_cache_reuse": derived(
        "the engine needs option.use_paged_context_fmha", KvCacheConfig="enable_block_reuse"
    ),
    "kv_cache_dtype": derived(
        "FP8 or INT8, chosen while compiling; fp32 is refused", QuantConfig="kv_cache_quant_algo"
    ),
    "paged_kv_cache": derived("PAGED, or CONTINUOUS when false", BuildConfig="kv_cache_type"),
    "workspace": derived("the folder, which is empty afterwards", LLM="workspace"),
    "extended_runtime_perf_knob_config": derived(
        "the fields that it names and that no other option sets", LLM="extended_runtime_perf_knob_config"
    ),
    "quantize": derived("W8A16, W4A16, W4A16_AWQ, W4A8_AWQ, W8A8_SQ_PER_CHANNEL or FP8", QuantConfig="quant_algo"),
    "smoothquant_alpha": derived("with smoothquant", QuantConfig="smoothquant_val"),
    "smoothquant_per_token": derived(_SMOOTHQUANT, QuantConfig="quant_algo"),
    "smoothquant_per_channel": derived(_SMOOTHQUANT, QuantConfig="quant_algo"),
    "awq_format": derived("W4A16_AWQ or W4A8_AWQ", QuantConfig="quant_algo"),
    "calib_size": derived("calib_size / calib_batch_size, rounded up", CalibConfig="calib_batches"),
    "chatglm_model_version": derived(_MODEL_VERSION, LLM="model"),
    "gpt_model_version": derived(_MODEL_VERSION, LLM="model"),
    "enforce_eager": derived("false when true", ExtendedRuntimePerfKnobConfig="cuda_graph_mode"),
    **without("a compiled engine always gathers them", "enable_iter_perf_stats"),
    **without("whether a compiled engine follows it is not known", "pp_partition"),
}
ENGINE = bounded(_ENGINE)
"""On an engine that TensorRT-LLM compiles (`option.backend=tensorrt`)."""

_PYTORCH: Effects = {
    **_BOTH,
    **fields(
        "LLM",
        "max_seq_len",
        "max_num_tokens",
        "disable_overlap_scheduler",
        "stream_interval",
        "batch_wait_timeout_ms",
        "batch_wait_timeout_iters",
        "batch_wait_max_tokens_ratio",
        "allreduce_strategy",
        "force_dynamic_quantization",
        "sampler_type",
        "attn_backend",
        "enable_autotuner",
        "enable_min_latency",
        "enable_iter_perf_stats",
        "enable_iter_req_stats",
        "print_iter_log",
        "perf_metrics_max_requests",
        "garbage_collection_gen0_threshold",
        "checkpoint_format",
        "disable_flashinfer_sampling",
        "max_stats_len",
        "pp_partition",
        max_rolling_batch_size="max_batch_size",
    ),
    **fields("KvCacheConfig", "tokens_per_block", "mamba_ssm_cache_dtype", enable_kv_cache_reuse="enable_block_reuse"),
    **fields("MoeConfig", moe_backend="backend"),
    **fields(
        "CudaGraphConfig",
        cuda_graph_batch_sizes="batch_sizes",
        cuda_graph_max_batch_size="max_batch_size",
        cuda_graph_padding_enabled="enable_padding",
    ),
    **fields("TorchCompileConfig", "enable_fullgraph", "enable_inductor", "enable_piecewise_cuda_graph"),
    "gather_all_token_logits": passed(LLM="gather_generation_logits"),
    "max_beam_width": passed(LLM="max_beam_width", when_set=True),
    "max_input_len": derived("also the limit at admission", LLM="max_input_len"),
    "max_output_len": derived("max_input_len + max_output_len; also the limit at admission", LLM="max_seq_len"),
    "max_num_sequences": derived("the smaller of this and max_rolling_batch_size", LLM="max_batch_size"),
    "kv_cache_dtype": derived("fp8; int8 and fp32 are refused", KvCacheConfig="dtype"),
    "enable_overlap_scheduler": derived("negated", LLM="disable_overlap_scheduler"),
    "quantize": Derived("refused unless the checkpoint is quantised so: this backend does not quantise"),
    "use_cuda_graph": derived("None when false", LLM="cuda_graph_config"),
    "enforce_eager": derived("None when true", LLM="cuda_graph_config"),
    **fixed("this backend's only one", kv_cache_type=KvCacheType.PAGED, paged_kv_cache=True),
    **fixed("this backend's only one", batching_type=BatchingType.INFLIGHT),
    **without("chosen per request", "gather_context_logits"),
    **without("the kernels choose", "multi_block_mode"),
    **without("the model's code chooses", "use_fused_mlp"),
    **without("option.use_cuda_graph is this backend's", "cuda_graph_mode"),
    **without("option.cuda_graph_batch_sizes is this backend's", "cuda_graph_cache_size"),
    **without("read from the checkpoint's hf_quant_config.json", "quant_algo"),
    **without("use option.kv_cache_dtype", "kv_cache_quant_algo"),
    **without("read from the checkpoint's config.json", "chatglm_model_version", "gpt_model_version"),
}
PYTORCH = bounded(_PYTORCH)
"""On TensorRT-LLM's PyTorch backend and on AutoDeploy (`option.backend=pytorch`, `autodeploy`)."""
