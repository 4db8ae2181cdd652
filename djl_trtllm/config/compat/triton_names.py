"""What a Triton model repository for TensorRT-LLM can hold, name by name.

From the `config.pbtxt` files and `model_instance_state.cc` of tensorrtllm_backend, v0.5 to v0.19.
"""

from __future__ import annotations

from collections.abc import Mapping

ENGINE_MODEL = "tensorrt_llm"
MODELS = (ENGINE_MODEL, "tensorrt_llm_bls", "ensemble", "preprocessing", "postprocessing")
"""The models of a repository, in the order of precedence."""

_BATCH = "max_batch_size"
TO_FILL: Mapping[str, frozenset[str]] = {
    ENGINE_MODEL: frozenset(
        {_BATCH, "decoupled", "gpt_model_type", "batch_scheduler_policy", "kv_cache_free_gpu_mem_fraction"}
    ),
    "tensorrt_llm_bls": frozenset({_BATCH, "decoupled"}),
    "ensemble": frozenset({_BATCH}),
    "preprocessing": frozenset({_BATCH, "tokenizer_dir"}),
    "postprocessing": frozenset({_BATCH, "tokenizer_dir"}),
}
"""Placeholders that the workflow for Llama requires."""

EXAMPLES: Mapping[str, str] = {
    _BATCH: "max_batch_size: 256",
    "decoupled": "decoupled: true",
    "gpt_model_type": 'string_value: "inflight_fused_batching"',
    "batch_scheduler_policy": 'string_value: "max_utilization"',
    "kv_cache_free_gpu_mem_fraction": 'string_value: "0.9"',
    "tokenizer_dir": 'string_value: "/models/Meta-Llama-3-8B-Instruct"',
}
"""What to write for each of them."""

STRUCTURE = frozenset(
    {
        "name",
        "platform",
        "backend",
        "runtime",
        "default_model_filename",
        "version_policy",
        "input",
        "output",
        "ensemble_scheduling",
    }
)
"""Fields for a model's tensors and the connections of models; they set nothing."""

TRITON_ONLY = frozenset(
    {
        "batch_input",
        "batch_output",
        "cc_model_filenames",
        "dynamic_batching",
        "instance_group",
        "metric_tags",
        "model_metrics",
        "model_operations",
        "model_repository_agents",
        "model_transaction_policy",
        "model_warmup",
        "optimization",
        "parameters",
        "response_cache",
        "sequence_batching",
    }
)
"""Further fields of Triton's model configuration."""

OPTION_OF: Mapping[str, str] = {
    name: f"option.{name}"
    for name in (
        # tensorrt_llm
        "batch_scheduler_policy",
        "cancellation_check_period_ms",
        "cross_kv_cache_fraction",
        "cuda_graph_cache_size",
        "cuda_graph_mode",
        "decoding_mode",
        "decoupled",
        "eagle_choices",
        "enable_chunked_context",
        "enable_context_fmha_fp32_acc",
        "enable_kv_cache_reuse",
        "enable_trt_overlap",
        "encoder_input_features_data_type",
        "encoder_model_path",
        "exclude_input_in_output",
        "gpt_model_type",
        "gpu_device_ids",
        "gpu_weights_percent",
        "guided_decoding_backend",
        "iter_stats_max_iterations",
        "kv_cache_free_gpu_mem_fraction",
        "kv_cache_host_memory_bytes",
        "kv_cache_onboard_blocks",
        "lookahead_ngram_size",
        "lookahead_verification_set_size",
        "lookahead_window_size",
        "lora_cache_gpu_memory_fraction",
        "lora_cache_host_memory_bytes",
        "lora_cache_max_adapter_size",
        "lora_cache_optimal_adapter_size",
        "lora_prefetch_dir",
        "max_attention_window_size",
        "max_beam_width",
        "max_num_sequences",
        "max_queue_delay_microseconds",
        "max_tokens_in_paged_kv_cache",
        "medusa_choices",
        "multi_block_mode",
        "normalize_log_probs",
        "num_nodes",
        "participant_ids",
        "recv_poll_period_ms",
        "request_stats_max_iterations",
        "sink_token_length",
        "speculative_decoding_fast_logits",
        "stats_check_period_ms",
        "xgrammar_tokenizer_info_path",
        # preprocessing, postprocessing
        "add_special_tokens",
        "max_num_images",
        "multimodal_model_path",
        "skip_special_tokens",
        "tokenizer_dir",
        # tensorrt_llm_bls
        "accumulate_tokens",
        "logits_datatype",
        "multimodal_encoders_name",
        "tensorrt_llm_draft_model_name",
        "tensorrt_llm_model_name",
    )
} | {"max_queue_size": "job_queue_size", "max_batch_size": "option.max_rolling_batch_size"}
"""Names that are options of this server."""

IGNORED: Mapping[str, str] = {
    "FORCE_CPU_ONLY_INPUT_TENSORS": "there are no tensors between models here",
    "executor_worker_path": "the engine process is part of this package",
    "tokenizer_type": "the tokenizer's files show its type",
    "preferred_batch_size": "a request joins the running batch at the next iteration",
    "instance_group.count": "one process tokenises and one runs the engine; copies are not needed",
    "instance_group.gpus": "choose GPUs with CUDA_VISIBLE_DEVICES",
}
"""Names that have no effect here, with the reasons."""
