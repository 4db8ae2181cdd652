"""The batch that runs: its lengths, the KV cache, the scheduler, and how tokens are chosen."""

from __future__ import annotations

from typing import Literal

from djl_trtllm.config.options.choices import (
    BatchingType,
    ChunkingPolicy,
    GuidedDecoding,
    KvCacheDType,
    KvCacheType,
    SamplerType,
    SchedulerPolicy,
)
from djl_trtllm.config.options.option import (
    DJL,
    FINDING,
    LMI,
    OURS,
    RUNTIME,
    TRITON,
    TRTLLM,
    OptionGroup,
    count,
    option,
    unset,
)


class LimitOptions(OptionGroup, name="limits", heading="Lengths and batch"):
    max_input_len: int = option(
        1024,
        "Longest prompt of a request. A longer one is refused with an error that holds both numbers. Widened when "
        "`option.max_num_tokens` is set. A compiled engine's default is what it was compiled for.",
        **count("tokens"),
        source=f"{LMI}, {FINDING}",
    )
    max_output_len: int = option(
        512,
        "Most tokens one sequence may generate. A request for more is refused with an error that holds both numbers; "
        "defaults, such as LMI's 30 tokens, are lowered to it. Widened when `option.max_num_tokens` is set. A compiled "
        "engine's default is what it was compiled for.",
        **count("tokens"),
        source=f"{LMI}, {FINDING}",
    )
    max_seq_len: int | None = unset(
        "Longest sequence, prompt and output together. A compiled engine's default is what it was compiled for.",
        aliases=("option.max_model_len", "option.max_decoder_seq_len"),
        unit="tokens",
        at_least=2,
        example="2048",
        default_note="max_input_len + max_output_len, at most what the model was trained for",
        source=TRTLLM,
    )
    max_num_tokens: int | None = unset(
        "Tokens of all requests together that the engine processes in one iteration. Setting it to N also raises "
        "`option.max_input_len` and `option.max_output_len` to at least min(4096, N) and "
        "`option.max_rolling_batch_size` to at least 256.",
        **count("tokens"),
        example="16384",
        default_note="on GPUs what fits (measured or estimated), at most 16384; on CPUs 256 or 512; nothing is widened",
        source=FINDING,
    )
    strict_memory: bool = option(
        False,
        "Refuse to start where model and options do not fit the memory of the GPUs, by the measured tables or the "
        "estimate (docs/sizing.md), before anything is compiled. Otherwise that is a warning.",
        effect="refuses checkpoints on GPUs; on CPUs nothing: the KV cache is fitted to the memory that is free",
        source=FINDING,
    )
    max_rolling_batch_size: int = option(
        32,
        "Sequences that are generated at the same time; further requests wait in the queue. A request with `n`, "
        "`best_of` or beams takes as many places as it has sequences. Widened when `option.max_num_tokens` is set. A "
        "compiled engine's default is what it was compiled for.",
        **count("sequences"),
        source=f"{LMI}, {FINDING}",
    )
    max_num_sequences: int | None = unset(
        "Sequences the engine itself is made for, where that is to differ from `option.max_rolling_batch_size`. As "
        "`option.max_batch_size` it also sets `option.max_rolling_batch_size`, unless that is set.",
        **count("sequences"),
        example="32",
        default_note="max_rolling_batch_size",
        source=LMI,
        aliases=("option.max_batch_size",),
    )


class KvCacheOptions(OptionGroup, name="kv_cache", heading="KV cache", source=TRTLLM):
    """Size, reuse, windows and offloading of the KV cache."""

    # TensorRT-LLM's kernels want a power of two (cpp/tensorrt_llm/kernels/kvCacheUtils.h).
    tokens_per_block: int = option(
        64, "Size of one block of the paged KV cache.", **count("tokens"), power_of_two=True, source=LMI
    )
    kv_cache_free_gpu_mem_fraction: float | None = unset(
        "Fraction of the memory that is free once the model is loaded that the KV cache may take. With "
        "`option.max_tokens_in_paged_kv_cache` also set, the smaller of the two is used.",
        aliases=("option.free_gpu_memory_fraction",),
        above=0,
        below=1,
        example="0.9",
        default_note="0.95 on GPUs; on OpenVINO the cache is sized by the batch and length limits",
        source=f"{LMI}, {RUNTIME}",
    )
    max_tokens_in_paged_kv_cache: int | None = unset(
        "Most tokens the KV cache holds. Best left unset unless the number is known.",
        aliases=("option.max_tokens",),
        **count("tokens"),
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
            "fp8_e4m3": "fp8",
        },
    )
    max_attention_window: tuple[int, ...] | None = unset(
        "Tokens that are attended to for each new one: one number, or one per layer (repeated over the layers). "
        "Smaller than the longest sequence, only the cache of the window's tokens is kept, which is faster and "
        "less accurate.",
        aliases=("option.max_attention_window_size",),
        **count("tokens"),
        example="4096",
        default_note="the longest sequence",
        source=RUNTIME,
    )
    sink_token_length: int | None = unset(
        "First tokens of a sequence that stay in the attention window (StreamingLLM).",
        unit="tokens",
        at_least=0,
        example="4",
        default_note="none",
    )
    host_cache_size: int | None = unset(
        "Host memory for reusable blocks that no longer fit on the GPU.",
        aliases=("option.kv_cache_host_memory_bytes",),
        unit="bytes",
        at_least=0,
        example="1073741824",
        default_note="none",
    )
    onboard_blocks: bool = option(
        True,
        "Bring blocks back to the GPU before they are reused from host memory.",
        aliases=("option.kv_cache_onboard_blocks",),
    )
    secondary_offload_min_priority: int | None = unset(
        "Only blocks of at least this priority are offloaded to host memory.",
        at_least=0,
        at_most=100,
        example="35",
        default_note="the engine's own",
    )
    event_buffer_max_size: int = option(
        0,
        "Events about stored and removed blocks that the engine keeps for readers; 0 keeps none.",
        unit="events",
        at_least=0,
    )
    enable_partial_reuse: bool = option(True, "Reuse blocks of which only the first tokens are alike.")
    copy_on_partial_reuse: bool = option(True, "Copy a block that is in use before part of it is reused.")
    use_uvm: bool = option(False, "Put the KV cache into memory that GPU and host share.")
    max_gpu_total_bytes: int = option(
        0, "Most bytes of GPU memory the KV cache may take; 0 leaves it to the fraction.", unit="bytes", at_least=0
    )
    attention_dp_events_gather_period_ms: int = option(
        5, "Interval at which cache events are gathered under attention data parallelism.", **count("milliseconds")
    )
    mamba_ssm_cache_dtype: Literal["auto", "float16", "bfloat16", "float32"] = option(
        "auto",
        "Number format of the state of Mamba layers.",
        value_aliases={"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"},
    )
    fail_fast_on_attention_window_too_large: bool = option(
        False, "Fail at start where an attention window is larger than the KV cache, instead of shrinking it."
    )
    kv_cache_type: KvCacheType | None = unset(
        "Layout of the KV cache of a compiled engine. In-flight batching needs `paged`.",
        example="paged",
        default_note="paged",
    )
    paged_kv_cache: bool = option(
        True, "Compile the engine with a paged KV cache (trtllm-build --paged_kv_cache).", source=TRITON
    )


class SchedulerOptions(OptionGroup, name="scheduler", heading="Scheduler", source=TRTLLM):
    """Policies of the scheduler, chunked prefill, overlap and waiting."""

    batch_scheduler_policy: SchedulerPolicy = option(
        SchedulerPolicy.MAX_UTILIZATION,
        "`max_utilization` starts as many sequences as fit now and may pause some later; `guaranteed_no_evict` starts "
        "only what fits to its end; `static_batch` finishes a whole batch before the next one (a legacy mode).",
        aliases=("option.capacity_scheduler_policy",),
        source=f"{LMI}, {RUNTIME}",
    )
    context_chunking_policy: ChunkingPolicy | None = unset(
        "Order of the chunks of prompts under chunked prefill: all of the first request first, or all requests alike.",
        example="first_come_first_served",
        default_note="first_come_first_served",
        source=RUNTIME,
    )
    enable_chunked_prefill: bool = option(
        False,
        "Split long prompts over several iterations, so that a prompt may be longer than `option.max_num_tokens`.",
        aliases=("option.enable_chunked_context",),
        source=f"{TRTLLM}, {DJL}",
    )
    batching_type: BatchingType | None = unset(
        "`inflight` lets requests join a running batch, `static` runs batch after batch.",
        aliases=("option.gpt_model_type", "option.batching_strategy"),
        value_aliases={"v1": "static", "inflight_batching": "inflight", "inflight_fused_batching": "inflight"},
        example="inflight",
        default_note="inflight",
        source=f"{TRITON}, {TRTLLM}",
    )
    enable_overlap_scheduler: bool | None = unset(
        "Prepare the next iteration while the GPU runs the current one. The PyTorch backend's scheduler; not the "
        "option of early engines.",
        example="true",
        default_note="the engine's own: on",
        source=DJL,
    )
    disable_overlap_scheduler: bool = option(
        False, "Do not overlap iterations; `option.enable_overlap_scheduler` overrides it."
    )
    enable_batch_size_tuning: bool | None = unset(
        "Let the engine adapt its batch to the traffic.", example="true", default_note="the engine's own: on"
    )
    enable_max_num_tokens_tuning: bool | None = unset(
        "Let the engine adapt the tokens of an iteration to the traffic.",
        example="false",
        default_note="the engine's own: off",
    )
    dynamic_batch_moving_average_window: int | None = unset(
        "Iterations over which the traffic is averaged for dynamic batch tuning.",
        **count("iterations"),
        example="128",
        default_note="the engine's own: 128",
    )
    stream_interval: int | Literal["auto"] = option(
        "auto",
        "Iterations between two messages of a stream. Larger saves work and makes streams coarser; the first token and "
        "the end of a sequence do not wait. With `auto` it is 1 with TensorRT-LLM, and above 1,024 sequences at once, "
        "whose responses would take most of a core, one more for each further 1,024. On a CPU, whose cores the engine "
        "shares with the server, `auto` sends iterations of less than 4 milliseconds together.",
        **count("iterations"),
        example="10",
    )
    batch_wait_timeout_ms: float = option(
        0.0, "Longest wait for more requests before an iteration begins.", unit="milliseconds", at_least=0
    )
    batch_wait_timeout_iters: int = option(
        0, "Iterations a prompt may be held back for a fuller batch.", unit="iterations", at_least=0
    )
    batch_wait_max_tokens_ratio: float = option(
        0.0, "Share of `option.max_num_tokens` at which a held back batch starts.", at_least=0, at_most=1
    )


class DecodingOptions(OptionGroup, name="decoding", heading="Decoding", source=DJL):
    """Properties of decoding that the engine has to know before the first request asks for them."""

    max_beam_width: int = option(
        1,
        "Most beams of one request; on the PyTorch backend of TensorRT-LLM, the beams of every request.",
        **count("beams"),
    )
    normalize_log_probs: bool = option(False, "Divide the log probability of a beam by its length.")
    guided_decoding_backend: GuidedDecoding | None = unset(
        "Library that holds output to a grammar or a JSON schema, `none` for none. Without one, requests with a "
        "guide are answered with an error. A grammar is EBNF for xgrammar, Lark's for llguidance.",
        example="xgrammar",
        default_note="xgrammar; none on AutoDeploy, and on the PyTorch backend of TensorRT-LLM 1.0",
    )
    stop_in_engine: bool | None = unset(
        "Whether the engine ends a sequence at a stop string or a stop token id. If not, the server finds both and "
        "cancels the sequence in the engine, which costs an iteration or two. TensorRT-LLM 0.20 and 0.21 lose host "
        "memory with each request that has one (TensorRT-LLM #5509). Beam search is always ended by the engine.",
        example="false",
        default_note="true; false on TensorRT-LLM before 1.0",
        source=OURS,
    )
    sampler_type: SamplerType = option(SamplerType.AUTO, "Implementation of sampling.", source=TRTLLM)
    ignored_seed: Literal["refuse", "warn"] = option(
        "refuse",
        "What happens to a sampled request with a `seed` if the engine's sampler ignores seeds, as on the PyTorch "
        "backend of TensorRT-LLM 1.2: `refuse` it, or answer it with the response header `Warning`.",
        effect="refuses seeds that the engine ignores, or warns of them",
        source=OURS,
    )
