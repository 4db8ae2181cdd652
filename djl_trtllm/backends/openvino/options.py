"""What each option becomes on OpenVINO GenAI."""

from __future__ import annotations

from djl_trtllm.backends.effects import SENT_TOGETHER, Derived, Effects, bounded, derived, fixed, without
from djl_trtllm.config.options.choices import BatchingType, ChunkingPolicy, KvCacheType, LoadFormat, SchedulerPolicy

_SMALLER = "limit at admission, the smaller of this and max_rolling_batch_size"

_EFFECTS: Effects = {
    "trust_remote_code": Derived("trust_remote_code of the export and of the tokenizer"),
    "dtype": Derived("weight format of the export and INFERENCE_PRECISION_HINT"),
    "max_input_len": Derived("limit at admission"),
    "max_output_len": Derived("limit at admission"),
    "max_seq_len": Derived("limit at admission"),
    "max_rolling_batch_size": Derived("limit at admission"),
    "max_num_sequences": Derived(_SMALLER),
    "max_num_tokens": derived(
        "tokens of a step; not derived from memory, as activations are small", SchedulerConfig="max_num_batched_tokens"
    ),
    "kv_cache_free_gpu_mem_fraction": derived(
        "fraction of free host memory, only when set", SchedulerConfig="num_kv_blocks"
    ),
    "max_tokens_in_paged_kv_cache": derived("value / 32", SchedulerConfig="num_kv_blocks"),
    "enable_kv_cache_reuse": derived("keeps the blocks of finished prompts", SchedulerConfig="enable_prefix_caching"),
    "kv_cache_dtype": Derived(
        "KV_CACHE_PRECISION; auto is fp16, because OpenVINO's own default (u8) changes greedy output"
    ),
    **fixed(
        "requests lose their output when this engine runs out of cache",
        batch_scheduler_policy=SchedulerPolicy.GUARANTEED_NO_EVICT,
    ),
    "inference_num_threads": Derived("INFERENCE_NUM_THREADS"),
    "stream_interval": Derived(f"{SENT_TOGETHER.note}; by default that of 4 milliseconds"),
    "quantize": Derived(
        "weight compression of the export: int8 and int4 as they are, awq as int4 with NNCF's data-free AWQ; "
        "w4a8_awq, smoothquant and fp8 are refused"
    ),
    "awq_format": Derived("int4_awq is 4-bit weights with NNCF's AWQ; w4a8_awq is refused"),
    **fixed("weights are always loaded", load_format=LoadFormat.AUTO),
    **fixed("OpenVINO's block size", tokens_per_block=32),
    **without("the window is that of the model's config.json", "max_attention_window"),
    **without("the cache is in host memory", "host_cache_size", "onboard_blocks", "use_uvm"),
    **without("whole blocks are reused", "enable_partial_reuse", "copy_on_partial_reuse"),
    **without("there is no GPU", "max_gpu_total_bytes", "cuda_graph_mode", "cuda_graph_cache_size"),
    **fixed("OpenVINO's continuous batching", kv_cache_type=KvCacheType.PAGED, paged_kv_cache=True),
    **fixed(
        "prompts are split in the order of arrival", context_chunking_policy=ChunkingPolicy.FIRST_COME_FIRST_SERVED
    ),
    **fixed("SchedulerConfig.dynamic_split_fuse", enable_chunked_prefill=True),
    **fixed("OpenVINO's continuous batching", batching_type=BatchingType.INFLIGHT),
    **fixed("one CPU engine", tensor_parallel_degree=1, pipeline_parallel_degree=1, context_parallel_size=1),
    **without(
        "one CPU engine",
        "moe_tensor_parallel_size",
        "moe_expert_parallel_size",
        "moe_cluster_parallel_size",
        "enable_attention_dp",
        "enable_lm_head_tp_in_adp",
        "embedding_parallel_mode",
        "allreduce_strategy",
        "gpus_per_node",
        "orchestrator_type",
    ),
    **fixed("a model runs on one machine", num_nodes=1, cluster_size=1),
    **without("encoder-decoder models are not served", "max_encoder_input_len"),
    **without("chosen per request", "gather_generation_logits"),
    **without("compiling works inside the engine cache", "workspace"),
    **without("progress is logged", "enable_tqdm"),
    **without("smoothquant is refused", "smoothquant_alpha", "smoothquant_per_token", "smoothquant_per_channel"),
    **without("the export chooses the group size", "awq_block_size"),
    **without(
        "the export quantises without samples",
        "calib_size",
        "calib_batch_size",
        "calib_batches",
        "calib_dataset",
        "calib_max_seq_length",
        "tokenizer_max_seq_length",
        "random_seed",
        "calib_device",
    ),
    **without("use option.quantize", "quant_algo"),
    **without("use option.kv_cache_dtype", "kv_cache_quant_algo"),
    **without("read from the checkpoint's config.json", "chatglm_model_version", "gpt_model_version"),
    **fixed("requests with beams are answered with an error", max_beam_width=1),
    **without("OpenVINO brings its own", "guided_decoding_backend"),
    **without(
        "adapters are not served on the CPU; merge the adapter into the checkpoint",
        "enable_lora",
        "max_lora_rank",
        "lora_dir",
        "lora_ckpt_source",
        "lora_target_modules",
        "lora_cache_optimal_adapter_size",
        "lora_cache_max_adapter_size",
        "lora_cache_gpu_memory_fraction",
        "lora_cache_host_memory_bytes",
    ),
}

EFFECTS = bounded(_EFFECTS)
"""On OpenVINO GenAI's continuous batching pipeline (`option.backend=openvino`)."""
