"""How long, how many, how much memory."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import KvCacheDType, SchedulerPolicy
from djl_trtllm.config.option import Option
from djl_trtllm.config.options.group import OptionGroup

LMI = "lmi-trt-llm.md"
FINDING = "finding-max-num-tokens.md"
RUNTIME = "useful-runtime-options.md"


class LimitOptions(OptionGroup):
    """Lengths, batch, scheduler and KV cache."""

    max_input_len: Annotated[
        int,
        Option(
            "option.max_input_len",
            "Longest prompt of a request. A longer one is refused with an error that holds both numbers. Widened when "
            "`option.max_num_tokens` is set.",
            unit="tokens",
            at_least=1,
            tensorrt="BuildConfig.max_input_len, and the limit at admission",
            pytorch="LLM(max_input_len), and the limit at admission",
            openvino="limit at admission",
            source=f"{LMI}, {FINDING}",
        ),
    ] = 1024
    max_output_len: Annotated[
        int,
        Option(
            "option.max_output_len",
            "Most tokens one request may generate. Widened when `option.max_num_tokens` is set.",
            unit="tokens",
            at_least=1,
            tensorrt="BuildConfig.max_seq_len = max_input_len + max_output_len, and the limit at admission",
            pytorch="LLM(max_seq_len) = max_input_len + max_output_len, and the limit at admission",
            openvino="limit at admission",
            source=f"{LMI}, {FINDING}",
        ),
    ] = 512
    max_seq_len: Annotated[
        int | None,
        Option(
            "option.max_seq_len",
            "Longest sequence, prompt and output together.",
            aliases=("option.max_model_len",),
            unit="tokens",
            at_least=2,
            example="2048",
            default_note="max_input_len + max_output_len, at most what the model was trained for",
            tensorrt="BuildConfig.max_seq_len",
            pytorch="LLM(max_seq_len)",
            openvino="limit at admission",
            source="TensorRT-LLM BuildConfig",
        ),
    ] = None
    max_num_tokens: Annotated[
        int | None,
        Option(
            "option.max_num_tokens",
            "Tokens of all requests together that the engine processes in one iteration. Setting it to N also raises "
            "`option.max_input_len` and `option.max_output_len` to at least min(4096, N) and "
            "`option.max_rolling_batch_size` to at least 256.",
            unit="tokens",
            at_least=1,
            example="16384",
            default_note="estimated from model, memory and the other limits, and nothing is widened",
            tensorrt="BuildConfig.max_num_tokens and LLM(max_num_tokens)",
            pytorch="LLM(max_num_tokens)",
            openvino="SchedulerConfig.max_num_batched_tokens",
            source=FINDING,
        ),
    ] = None
    max_rolling_batch_size: Annotated[
        int,
        Option(
            "option.max_rolling_batch_size",
            "Sequences that are generated at the same time; further requests wait in the queue. Widened when "
            "`option.max_num_tokens` is set.",
            unit="sequences",
            at_least=1,
            tensorrt="BuildConfig.max_batch_size and LLM(max_batch_size)",
            pytorch="LLM(max_batch_size)",
            openvino="limit at admission (OpenVINO ignores SchedulerConfig.max_num_seqs here)",
            source=f"{LMI}, {FINDING}",
        ),
    ] = 32
    max_num_sequences: Annotated[
        int | None,
        Option(
            "option.max_num_sequences",
            "Sequences the engine itself is made for, where that is to differ from `option.max_rolling_batch_size`.",
            unit="sequences",
            at_least=1,
            example="32",
            default_note="max_rolling_batch_size",
            tensorrt="BuildConfig.max_batch_size and LLM(max_batch_size)",
            pytorch="LLM(max_batch_size)",
            openvino="limit at admission, the smaller of this and max_rolling_batch_size",
            source=LMI,
        ),
    ] = None
    batch_scheduler_policy: Annotated[
        SchedulerPolicy,
        Option(
            "option.batch_scheduler_policy",
            "`max_utilization` starts as many sequences as fit now and may pause some later; `guaranteed_no_evict` "
            "starts only what fits to its end; `static_batch` finishes a whole batch before the next one (a legacy "
            "mode).",
            aliases=("option.capacity_scheduler_policy",),
            tensorrt="SchedulerConfig.capacity_scheduler_policy",
            pytorch="SchedulerConfig.capacity_scheduler_policy",
            openvino="always guaranteed_no_evict: requests lose their output when this engine runs out of cache",
            source=f"{LMI}, {RUNTIME}",
        ),
    ] = SchedulerPolicy.MAX_UTILIZATION
    tokens_per_block: Annotated[
        int,
        Option(
            "option.tokens_per_block",
            "Size of one block of the paged KV cache.",
            unit="tokens",
            at_least=1,
            tensorrt="PluginConfig.tokens_per_block and KvCacheConfig.tokens_per_block",
            pytorch="KvCacheConfig.tokens_per_block",
            openvino="ignored: OpenVINO's block size is 32",
            source=LMI,
        ),
    ] = 64
    kv_cache_free_gpu_mem_fraction: Annotated[
        float | None,
        Option(
            "option.kv_cache_free_gpu_mem_fraction",
            "Fraction of the memory that is free once the model is loaded that the KV cache may take. With "
            "`option.max_tokens_in_paged_kv_cache` also set, the smaller of the two counts.",
            aliases=("option.free_gpu_memory_fraction",),
            above=0,
            below=1,
            example="0.9",
            default_note="0.95 on GPUs; on OpenVINO the cache is sized by the batch and length limits",
            tensorrt="KvCacheConfig.free_gpu_memory_fraction, 0.95 when not set",
            pytorch="KvCacheConfig.free_gpu_memory_fraction, 0.95 when not set",
            openvino="fraction of free host memory, used only when set (SchedulerConfig.num_kv_blocks)",
            source=f"{LMI}, {RUNTIME}",
        ),
    ] = None
    max_tokens_in_paged_kv_cache: Annotated[
        int | None,
        Option(
            "option.max_tokens_in_paged_kv_cache",
            "Most tokens the KV cache holds. Best left unset unless the number is known.",
            aliases=("option.max_tokens",),
            unit="tokens",
            at_least=1,
            example="65536",
            default_note="what the memory fraction gives",
            tensorrt="KvCacheConfig.max_tokens",
            pytorch="KvCacheConfig.max_tokens",
            openvino="SchedulerConfig.num_kv_blocks = value / 32",
            source=RUNTIME,
        ),
    ] = None
    enable_kv_cache_reuse: Annotated[
        bool,
        Option(
            "option.enable_kv_cache_reuse",
            "Keep the cache of finished prompts and reuse it for prompts that begin alike: faster first tokens for "
            "chats and shared instructions, at the cost of memory.",
            aliases=("option.enable_prefix_caching", "option.enable_block_reuse"),
            tensorrt="KvCacheConfig.enable_block_reuse, and use_paged_context_fmha when compiling",
            pytorch="KvCacheConfig.enable_block_reuse",
            openvino="SchedulerConfig.enable_prefix_caching",
            source=LMI,
        ),
    ] = False
    kv_cache_dtype: Annotated[
        KvCacheDType,
        Option(
            "option.kv_cache_dtype",
            "Number format of the KV cache. Smaller formats hold more tokens and may change the output.",
            value_aliases={
                "float16": "fp16",
                "half": "fp16",
                "f16": "fp16",
                "float32": "fp32",
                "f32": "fp32",
                "u8": "int8",
            },
            tensorrt="quantisation of the cache while compiling (QuantConfig.kv_cache_quant_algo)",
            pytorch="KvCacheConfig.dtype",
            openvino="KV_CACHE_PRECISION; auto is fp16, because OpenVINO's own default (u8) changes greedy output",
            source="TensorRT-LLM KvCacheConfig",
        ),
    ] = KvCacheDType.AUTO
