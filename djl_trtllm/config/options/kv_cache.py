"""The paged KV cache: how large, of what, what is kept."""

from __future__ import annotations

from djl_trtllm.config.options.choices import KvCacheDType, KvCacheType, StateDType
from djl_trtllm.config.options.documents import LMI, RUNTIME, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class KvCacheOptions(OptionGroup):
    """Size, reuse, windows and offloading of the KV cache."""

    # TensorRT-LLM's kernels want a power of two (cpp/tensorrt_llm/kernels/kvCacheUtils.h).
    tokens_per_block: int = option(
        64, "Size of one block of the paged KV cache.", unit="tokens", at_least=1, power_of_two=True, source=LMI
    )
    kv_cache_free_gpu_mem_fraction: float | None = option(
        None,
        "Fraction of the memory that is free once the model is loaded that the KV cache may take. With "
        "`option.max_tokens_in_paged_kv_cache` also set, the smaller of the two is used.",
        aliases=("option.free_gpu_memory_fraction",),
        above=0,
        below=1,
        example="0.9",
        default_note="0.95 on GPUs; on OpenVINO the cache is sized by the batch and length limits",
        source=f"{LMI}, {RUNTIME}",
    )
    max_tokens_in_paged_kv_cache: int | None = option(
        None,
        "Most tokens the KV cache holds. Best left unset unless the number is known.",
        aliases=("option.max_tokens",),
        unit="tokens",
        at_least=1,
        example="65536",
        default_note="what the memory fraction gives",
        source=RUNTIME,
    )
    enable_kv_cache_reuse: bool = option(
        False,
        "Keep the cache of finished prompts and reuse it for prompts that begin alike: faster first tokens for "
        "chats and shared instructions, at the cost of memory.",
        aliases=("option.enable_prefix_caching", "option.enable_block_reuse"),
        source=LMI,
    )
    kv_cache_dtype: KvCacheDType = option(
        KvCacheDType.AUTO,
        "Number format of the KV cache. Smaller formats hold more tokens and may change the output.",
        value_aliases={
            "float16": "fp16",
            "half": "fp16",
            "f16": "fp16",
            "float32": "fp32",
            "f32": "fp32",
            "u8": "int8",
        },
        source=TRTLLM,
    )
    max_attention_window: tuple[int, ...] | None = option(
        None,
        "Tokens that are attended to for each new one: one number, or one per layer (repeated over the layers). "
        "Smaller than the longest sequence, only the cache of the window's tokens is kept, which is faster and "
        "less accurate.",
        aliases=("option.max_attention_window_size",),
        unit="tokens",
        at_least=1,
        example="4096",
        default_note="the longest sequence",
        source=RUNTIME,
    )
    sink_token_length: int | None = option(
        None,
        "First tokens of a sequence that stay in the attention window (StreamingLLM).",
        unit="tokens",
        at_least=0,
        example="4",
        default_note="none",
        source=TRTLLM,
    )
    host_cache_size: int | None = option(
        None,
        "Host memory for reusable blocks that no longer fit on the GPU.",
        aliases=("option.kv_cache_host_memory_bytes",),
        unit="bytes",
        at_least=0,
        example="1073741824",
        default_note="none",
        source=TRTLLM,
    )
    onboard_blocks: bool = option(
        True,
        "Bring blocks back to the GPU before they are reused from host memory.",
        aliases=("option.kv_cache_onboard_blocks",),
        source=TRTLLM,
    )
    secondary_offload_min_priority: int | None = option(
        None,
        "Only blocks of at least this priority are offloaded to host memory.",
        at_least=0,
        at_most=100,
        example="35",
        default_note="the engine's own",
        source=TRTLLM,
    )
    event_buffer_max_size: int = option(
        0,
        "Events about stored and removed blocks that the engine keeps for readers; 0 keeps none.",
        unit="events",
        at_least=0,
        source=TRTLLM,
    )
    enable_partial_reuse: bool = option(True, "Reuse blocks of which only the first tokens are alike.", source=TRTLLM)
    copy_on_partial_reuse: bool = option(
        True, "Copy a block that is in use before part of it is reused.", source=TRTLLM
    )
    use_uvm: bool = option(False, "Put the KV cache into memory that GPU and host share.", source=TRTLLM)
    max_gpu_total_bytes: int = option(
        0,
        "Most bytes of GPU memory the KV cache may take; 0 leaves it to the fraction.",
        unit="bytes",
        at_least=0,
        source=TRTLLM,
    )
    attention_dp_events_gather_period_ms: int = option(
        5,
        "Interval at which cache events are gathered under attention data parallelism.",
        unit="milliseconds",
        at_least=1,
        source=TRTLLM,
    )
    mamba_ssm_cache_dtype: StateDType = option(
        StateDType.AUTO,
        "Number format of the state of Mamba layers.",
        value_aliases={"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
        source=TRTLLM,
    )
    fail_fast_on_attention_window_too_large: bool = option(
        False,
        "Fail at start where an attention window is larger than the KV cache, instead of shrinking it.",
        source=TRTLLM,
    )
    kv_cache_type: KvCacheType | None = option(
        None,
        "Layout of the KV cache of a compiled engine. In-flight batching needs `paged`.",
        example="paged",
        default_note="paged",
        source=TRTLLM,
    )
    paged_kv_cache: bool = option(
        True, "Compile the engine with a paged KV cache (trtllm-build --paged_kv_cache).", source=TRITON
    )
