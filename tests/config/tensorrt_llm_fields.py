"""Fields of TensorRT-LLM 1.2's configuration classes, as far as options reach them (and LLM's own arguments)."""

from __future__ import annotations

from collections.abc import Mapping


def _fields(text: str) -> frozenset[str]:
    return frozenset(text.split())


FIELDS: Mapping[str, frozenset[str]] = {
    "LLM": _fields(
        "model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype revision "
        "tokenizer_revision pipeline_parallel_size context_parallel_size gpus_per_node moe_cluster_parallel_size "
        "moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp enable_lm_head_tp_in_adp load_format "
        "enable_lora lora_config kv_cache_config enable_chunked_prefill guided_decoding_backend "
        "iter_stats_max_iterations request_stats_max_iterations scheduler_config speculative_config max_batch_size "
        "max_input_len max_seq_len max_beam_width max_num_tokens gather_generation_logits num_postprocess_workers "
        "reasoning_parser backend return_perf_metrics orchestrator_type fail_fast_on_attention_window_too_large "
        "enable_tqdm workspace enable_build_cache extended_runtime_perf_knob_config calib_config quant_config "
        "embedding_parallel_mode fast_build build_config enable_prompt_adapter max_prompt_adapter_token batching_type "
        "normalize_log_probs garbage_collection_gen0_threshold cuda_graph_config disable_overlap_scheduler moe_config "
        "attn_backend sampler_type enable_iter_perf_stats enable_iter_req_stats print_iter_log "
        "perf_metrics_max_requests batch_wait_timeout_ms batch_wait_timeout_iters batch_wait_max_tokens_ratio "
        "torch_compile_config enable_autotuner enable_min_latency stream_interval force_dynamic_quantization "
        "allreduce_strategy checkpoint_format disable_flashinfer_sampling max_stats_len"
    ),
    "KvCacheConfig": _fields(
        "enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size "
        "onboard_blocks cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size "
        "attention_dp_events_gather_period_ms enable_partial_reuse copy_on_partial_reuse use_uvm max_gpu_total_bytes "
        "dtype mamba_ssm_cache_dtype tokens_per_block"
    ),
    "SchedulerConfig": _fields("capacity_scheduler_policy context_chunking_policy dynamic_batch_config"),
    "DynamicBatchConfig": _fields(
        "enable_batch_size_tuning enable_max_num_tokens_tuning dynamic_batch_moving_average_window"
    ),
    "ExtendedRuntimePerfKnobConfig": _fields(
        "multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode cuda_graph_cache_size"
    ),
    "CalibConfig": _fields(
        "device calib_dataset calib_batches calib_batch_size calib_max_seq_length random_seed tokenizer_max_seq_length"
    ),
    "QuantConfig": _fields(
        "quant_algo kv_cache_quant_algo group_size smoothquant_val clamp_val use_meta_recipe has_zero_point "
        "pre_quant_scale exclude_modules mamba_ssm_cache_dtype"
    ),
    "BuildConfig": _fields(
        "max_input_len max_seq_len opt_batch_size max_batch_size max_beam_width max_num_tokens opt_num_tokens "
        "max_prompt_embedding_table_size kv_cache_type gather_context_logits gather_generation_logits strongly_typed "
        "force_num_profiles profiling_verbosity enable_debug_output max_draft_len speculative_decoding_mode use_refit "
        "input_timing_cache output_timing_cache weight_sparsity weight_streaming plugin_config use_strip_plan "
        "max_encoder_input_len dry_run visualize_network monitor_memory use_mrope"
    ),
    "PluginConfig": _fields(
        "gemm_plugin gpt_attention_plugin nccl_plugin lora_plugin moe_plugin context_fmha remove_input_padding "
        "use_paged_context_fmha use_fp8_context_fmha tokens_per_block multiple_profiles reduce_fusion user_buffer "
        "use_fused_mlp gemm_swiglu_plugin streamingllm"
    ),
    "CudaGraphConfig": _fields("batch_sizes max_batch_size enable_padding"),
    "TorchCompileConfig": _fields(
        "enable_fullgraph enable_inductor enable_piecewise_cuda_graph capture_num_tokens enable_userbuffers "
        "max_num_streams"
    ),
    "MoeConfig": _fields("backend"),
}
