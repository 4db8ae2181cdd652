"""Every name that the documents of LMI, TensorRT-LLM, Triton and Truss have is an option here."""

from __future__ import annotations

from djl_trtllm.config.options.registry import find

LMI = """
model_id tensor_parallel_degree max_rolling_batch_size max_input_len max_output_len use_custom_all_reduce
tokens_per_block batch_scheduler_policy kv_cache_free_gpu_mem_fraction max_num_sequences enable_trt_overlap
enable_kv_cache_reuse baichuan_model_version chatglm_model_version gpt_model_version multi_block_mode use_fused_mlp
rotary_base rotary_dim rotary_scaling_type rotary_scaling_factor quantize smoothquant_alpha smoothquant_per_token
smoothquant_per_channel multi_query_mode awq_format awq_calib_size use_paged_context_fmha
"""

FINDING = "max_num_tokens max_input_len max_output_len max_rolling_batch_size max_batch_size model_id"

RUNTIME = """
capacity_scheduler_policy context_chunking_policy max_tokens_in_paged_kv_cache kv_cache_free_gpu_mem_fraction
free_gpu_memory_fraction max_tokens max_attention_window_size max_attention_window max_seq_len tensor_parallel_size
model
"""

TRITON = """
model_type model_name dtype tp_size max_batch_size max_input_len max_output_len output_dir checkpoint_dir
context_fmha use_paged_context_fmha context_fmha_fp32_acc multi_block_mode gpt_attention_plugin gemm_plugin
remove_input_padding paged_kv_cache max_num_tokens opt_num_tokens tokenizer_dir decoupled gpt_model_type
batch_scheduler_policy kv_cache_free_gpu_mem_fraction world_size model_repo model_dir
"""

TRUSS = """
tensor_parallelism engine_repository tokenizer_repository hf_access_token max_tokens_in_paged_kv_cache
kv_cache_free_gpu_mem_fraction max_num_sequences enable_trt_overlap max_batch_size pipeline_parallelism
"""

HANDLERS = """
env predict_timeout model_loading_timeout entryPoint parallel_loading pythonExecutable pipeline_parallel_degree handler
enable_venv mpi_mode async_mode rolling_batch use_passive_workers modelName revision enable_lora
enable_stateful_sessions speculative_draft_model lmcache_auto_config model_id_or_path model_dir cluster_size
trust_remote_code enable_streaming dtype output_formatter input_formatter waiting_steps tgi_compat
bedrock_compat draft_model_id spec_length tokenizer tokenizer_mode skip_tokenizer_init tokenizer_revision
pipeline_parallel_size context_parallel_size moe_tensor_parallel_size moe_expert_parallel_size enable_attention_dp
auto_parallel auto_parallel_world_size load_format enable_chunked_prefill guided_decoding_backend
iter_stats_max_iterations request_stats_max_iterations embedding_parallel_mode fast_build enable_build_cache
batching_type normalize_log_probs gather_generation_logits extended_runtime_perf_knob_config max_batch_size
max_beam_width backend enable_block_reuse sink_token_length host_cache_size onboard_blocks cross_kv_cache_fraction
secondary_offload_min_priority event_buffer_max_size enable_overlap_scheduler kv_cache_dtype attn_backend
use_cuda_graph moe_backend logits_dtype trtllm_checkpoint_path num_checkpoint_workers num_engine_workers
load_by_shard q_format calib_size calib_batch_size awq_block_size use_fp8_context_fmha quant_algo
kv_cache_quant_algo group_size smoothquant_val clamp_val use_meta_recipe has_zero_point pre_quant_scales
exclude_modules device calib_dataset calib_batches calib_max_seq_length random_seed tokenizer_max_seq_length
max_draft_len default_accept max_rolling_batch_prefill_tokens enforce_eager
"""

BUILD_FLAGS = """
max_decoder_seq_len max_encoder_input_len max_prompt_embedding_table_size max_multimodal_len kv_cache_type
input_timing_cache output_timing_cache profiling_verbosity strip_plan weight_sparsity weight_streaming workers
enable_debug_output visualize_network dry_run monitor_memory gather_context_logits gather_all_token_logits lora_dir
lora_ckpt_source lora_target_modules max_lora_rank speculative_decoding_mode gpus_per_node nccl_plugin lora_plugin
moe_plugin multiple_profiles reduce_fusion user_buffer gemm_swiglu_plugin streamingllm
"""

KV_CACHE_CONFIG = """
enable_block_reuse max_tokens max_attention_window sink_token_length free_gpu_memory_fraction host_cache_size
onboard_blocks cross_kv_cache_fraction secondary_offload_min_priority event_buffer_max_size
attention_dp_events_gather_period_ms enable_partial_reuse copy_on_partial_reuse use_uvm max_gpu_total_bytes
mamba_ssm_cache_dtype tokens_per_block
"""

SCHEDULER_CONFIG = """
capacity_scheduler_policy context_chunking_policy enable_batch_size_tuning enable_max_num_tokens_tuning
dynamic_batch_moving_average_window
"""

TRITON_PARAMETERS = """
max_queue_delay_microseconds max_queue_size gpt_model_path engine_dir encoder_model_path batching_strategy
kv_cache_host_memory_bytes kv_cache_onboard_blocks enable_chunked_context exclude_input_in_output
cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms gpu_device_ids participant_ids num_nodes
gpu_weights_percent lora_cache_optimal_adapter_size lora_cache_max_adapter_size lora_cache_gpu_memory_fraction
lora_cache_host_memory_bytes lora_prefetch_dir decoding_mode medusa_choices eagle_choices lookahead_window_size
lookahead_ngram_size lookahead_verification_set_size enable_context_fmha_fp32_acc cuda_graph_mode
cuda_graph_cache_size speculative_decoding_fast_logits xgrammar_tokenizer_info_path
encoder_input_features_data_type logits_datatype executor_worker_path add_special_tokens skip_special_tokens
preprocessing_instance_count postprocessing_instance_count bls_instance_count multimodal_model_path max_num_images
accumulate_tokens tensorrt_llm_model_name tensorrt_llm_draft_model_name multimodal_encoders_name
"""

SERVER_KEYS = """
engine job_queue_size batch_size max_dynamic_batch_size max_batch_delay max_idle_time minWorkers maxWorkers
gpu.minWorkers gpu.maxWorkers cpu.minWorkers cpu.maxWorkers load_on_devices required_memory_mb reserved_memory_mb
gpu.required_memory_mb gpu.reserved_memory_mb retry_threshold log_request_metric metrics_aggregation
translatorFactory inference_address management_address cluster_address load_models model_store model_url_pattern
wait_model_loading allow_multi_status number_of_netty_threads max_request_size chunked_read_timeout
cors_allowed_origin cors_allowed_methods cors_allowed_headers keystore keystore_pass keystore_type certificate_file
private_key_file plugin_folder error_rate_wlm error_rate_server error_rate_model error_rate_any
bad_request_http_code wlm_error_http_code throttle_error_http_code timeout_http_code server_error_http_code
request_id_header_key use_native_io io_ratio prometheus fail_fast health_check_override features
"""


OPTION_NAMES = " ".join(
    (
        LMI,
        FINDING,
        RUNTIME,
        TRITON,
        TRUSS,
        HANDLERS,
        BUILD_FLAGS,
        KV_CACHE_CONFIG,
        SCHEDULER_CONFIG,
        TRITON_PARAMETERS,
    )
).split()


def test_every_documented_option_is_declared() -> None:
    assert len(set(OPTION_NAMES)) > 240
    declared = {name: find(f"option.{name}") for name in OPTION_NAMES}
    assert [name for name, found in declared.items() if found is None] == []


def test_every_documented_key_of_the_server_is_declared() -> None:
    names = SERVER_KEYS.split()
    assert len(names) > 50
    assert [name for name in names if find(name) is None] == []
