"""The paged KV cache: how large, of what, what is kept."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.choices import KvCacheDType, KvCacheType, StateDType
from djl_trtllm.config.option import Option
from djl_trtllm.config.options.documents import LMI, RUNTIME, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup


class KvCacheOptions(OptionGroup):
    """Size, reuse, windows and offloading of the KV cache."""

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
            tensorrt="KvCacheConfig.enable_block_reuse, and the engine needs use_paged_context_fmha",
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
            tensorrt="QuantConfig.kv_cache_quant_algo: FP8 or INT8, chosen while compiling; fp32 is refused",
            pytorch="KvCacheConfig.dtype: fp8; int8 and fp32 are refused",
            openvino="KV_CACHE_PRECISION; auto is fp16, because OpenVINO's own default (u8) changes greedy output",
            source=TRTLLM,
        ),
    ] = KvCacheDType.AUTO
    max_attention_window: Annotated[
        tuple[int, ...] | None,
        Option(
            "option.max_attention_window",
            "Tokens that are attended to for each new one: one number, or one per layer (repeated over the layers). "
            "Smaller than the longest sequence, only the cache of the last so many tokens is kept, which is faster "
            "and less accurate.",
            aliases=("option.max_attention_window_size",),
            unit="tokens",
            at_least=1,
            example="4096",
            default_note="the longest sequence",
            tensorrt="KvCacheConfig.max_attention_window",
            pytorch="KvCacheConfig.max_attention_window",
            openvino="no effect: the window of the model's own config.json counts",
            source=RUNTIME,
        ),
    ] = None
    sink_token_length: Annotated[
        int | None,
        Option(
            "option.sink_token_length",
            "First tokens of a sequence that stay in the attention window (StreamingLLM).",
            unit="tokens",
            at_least=0,
            example="4",
            default_note="none",
            tensorrt="KvCacheConfig.sink_token_length",
            pytorch="KvCacheConfig.sink_token_length",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = None
    host_cache_size: Annotated[
        int | None,
        Option(
            "option.host_cache_size",
            "Host memory for reusable blocks that no longer fit on the GPU.",
            aliases=("option.kv_cache_host_memory_bytes",),
            unit="bytes",
            at_least=0,
            example="1073741824",
            default_note="none",
            tensorrt="KvCacheConfig.host_cache_size",
            pytorch="KvCacheConfig.host_cache_size",
            openvino="no effect: the cache is in host memory already",
            source=TRTLLM,
        ),
    ] = None
    onboard_blocks: Annotated[
        bool,
        Option(
            "option.onboard_blocks",
            "Bring blocks back to the GPU before they are reused from host memory.",
            aliases=("option.kv_cache_onboard_blocks",),
            tensorrt="KvCacheConfig.onboard_blocks",
            pytorch="KvCacheConfig.onboard_blocks",
            openvino="no effect: the cache is in host memory already",
            source=TRTLLM,
        ),
    ] = True
    secondary_offload_min_priority: Annotated[
        int | None,
        Option(
            "option.secondary_offload_min_priority",
            "Only blocks of at least this priority are offloaded to host memory.",
            at_least=0,
            at_most=100,
            example="35",
            default_note="the engine's own",
            tensorrt="KvCacheConfig.secondary_offload_min_priority",
            pytorch="KvCacheConfig.secondary_offload_min_priority",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = None
    event_buffer_max_size: Annotated[
        int,
        Option(
            "option.event_buffer_max_size",
            "Events about stored and removed blocks that the engine keeps for readers; 0 keeps none.",
            unit="events",
            at_least=0,
            tensorrt="KvCacheConfig.event_buffer_max_size",
            pytorch="KvCacheConfig.event_buffer_max_size",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = 0
    enable_partial_reuse: Annotated[
        bool,
        Option(
            "option.enable_partial_reuse",
            "Reuse blocks of which only the first tokens are alike.",
            tensorrt="KvCacheConfig.enable_partial_reuse",
            pytorch="KvCacheConfig.enable_partial_reuse",
            openvino="no effect: whole blocks are reused",
            source=TRTLLM,
        ),
    ] = True
    copy_on_partial_reuse: Annotated[
        bool,
        Option(
            "option.copy_on_partial_reuse",
            "Copy a block that is in use before part of it is reused.",
            tensorrt="KvCacheConfig.copy_on_partial_reuse",
            pytorch="KvCacheConfig.copy_on_partial_reuse",
            openvino="no effect: whole blocks are reused",
            source=TRTLLM,
        ),
    ] = True
    use_uvm: Annotated[
        bool,
        Option(
            "option.use_uvm",
            "Put the KV cache into memory that GPU and host share.",
            tensorrt="KvCacheConfig.use_uvm",
            pytorch="KvCacheConfig.use_uvm",
            openvino="no effect: the cache is in host memory already",
            source=TRTLLM,
        ),
    ] = False
    max_gpu_total_bytes: Annotated[
        int,
        Option(
            "option.max_gpu_total_bytes",
            "Most bytes of GPU memory the KV cache may take; 0 leaves it to the fraction.",
            unit="bytes",
            at_least=0,
            tensorrt="KvCacheConfig.max_gpu_total_bytes",
            pytorch="KvCacheConfig.max_gpu_total_bytes",
            openvino="no effect: there is no GPU",
            source=TRTLLM,
        ),
    ] = 0
    attention_dp_events_gather_period_ms: Annotated[
        int,
        Option(
            "option.attention_dp_events_gather_period_ms",
            "Interval at which cache events are gathered under attention data parallelism.",
            unit="milliseconds",
            at_least=1,
            tensorrt="KvCacheConfig.attention_dp_events_gather_period_ms",
            pytorch="KvCacheConfig.attention_dp_events_gather_period_ms",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = 5
    mamba_ssm_cache_dtype: Annotated[
        StateDType,
        Option(
            "option.mamba_ssm_cache_dtype",
            "Number format of the state of Mamba layers.",
            value_aliases={"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
            tensorrt="no effect: read by the PyTorch backend only",
            pytorch="KvCacheConfig.mamba_ssm_cache_dtype",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = StateDType.AUTO
    fail_fast_on_attention_window_too_large: Annotated[
        bool,
        Option(
            "option.fail_fast_on_attention_window_too_large",
            "Fail at start where an attention window is larger than the KV cache, instead of shrinking it.",
            tensorrt="LLM(fail_fast_on_attention_window_too_large)",
            pytorch="no effect: read by the compiled engine only",
            openvino="no effect: OpenVINO has no such setting",
            source=TRTLLM,
        ),
    ] = False
    kv_cache_type: Annotated[
        KvCacheType | None,
        Option(
            "option.kv_cache_type",
            "Layout of the KV cache of a compiled engine. In-flight batching needs `paged`.",
            example="paged",
            default_note="paged",
            tensorrt="BuildConfig.kv_cache_type",
            pytorch="no effect: always paged",
            openvino="no effect: always paged",
            source=TRTLLM,
        ),
    ] = None
    paged_kv_cache: Annotated[
        bool,
        Option(
            "option.paged_kv_cache",
            "Compile the engine with a paged KV cache (trtllm-build --paged_kv_cache).",
            tensorrt="BuildConfig.kv_cache_type (PAGED, or CONTINUOUS when false)",
            pytorch="no effect: always paged",
            openvino="no effect: always paged",
            source=TRITON,
        ),
    ] = True
