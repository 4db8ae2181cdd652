"""Which requests run in an iteration, and what of them."""

from __future__ import annotations

from djl_trtllm.config.options.choices import BatchingType, ChunkingPolicy, SchedulerPolicy
from djl_trtllm.config.options.documents import DJL, LMI, RUNTIME, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import option


class SchedulerOptions(OptionGroup):
    """Policies of the scheduler, chunked prefill, overlap and waiting."""

    batch_scheduler_policy: SchedulerPolicy = option(
        SchedulerPolicy.MAX_UTILIZATION,
        "`max_utilization` starts as many sequences as fit now and may pause some later; `guaranteed_no_evict` starts "
        "only what fits to its end; `static_batch` finishes a whole batch before the next one (a legacy mode).",
        aliases=("option.capacity_scheduler_policy",),
        source=f"{LMI}, {RUNTIME}",
    )
    context_chunking_policy: ChunkingPolicy | None = option(
        None,
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
    batching_type: BatchingType | None = option(
        None,
        "`inflight` lets requests join a running batch, `static` runs batch after batch.",
        aliases=(
            "option.gpt_model_type",
            "option.batching_strategy",
        ),
        value_aliases={"v1": "static", "inflight_batching": "inflight", "inflight_fused_batching": "inflight"},
        example="inflight",
        default_note="inflight",
        source=f"{TRITON}, {TRTLLM}",
    )
    enable_overlap_scheduler: bool | None = option(
        None,
        "Prepare the next iteration while the GPU runs the current one. The PyTorch backend's scheduler; not the "
        "option of early engines.",
        example="true",
        default_note="the engine's own: on",
        source=DJL,
    )
    disable_overlap_scheduler: bool = option(
        False, "Do not overlap iterations; `option.enable_overlap_scheduler` overrides it.", source=TRTLLM
    )
    enable_batch_size_tuning: bool | None = option(
        None,
        "Let the engine adapt its batch to the traffic.",
        example="true",
        default_note="the engine's own: on",
        source=TRTLLM,
    )
    enable_max_num_tokens_tuning: bool | None = option(
        None,
        "Let the engine adapt the tokens of an iteration to the traffic.",
        example="false",
        default_note="the engine's own: off",
        source=TRTLLM,
    )
    dynamic_batch_moving_average_window: int | None = option(
        None,
        "Iterations over which the traffic is averaged for dynamic batch tuning.",
        unit="iterations",
        at_least=1,
        example="128",
        default_note="the engine's own: 128",
        source=TRTLLM,
    )
    stream_interval: int | None = option(
        None,
        "Iterations between two messages of a stream. Larger saves work and makes streams coarser; the first token and "
        "the end of a sequence do not wait. The log advises a larger one where reading TensorRT-LLM's responses takes "
        "most of a core. On a CPU, whose cores the engine shares with the server, iterations of less than 4 "
        "milliseconds are sent together by default.",
        unit="iterations",
        at_least=1,
        example="10",
        default_note="1; on a CPU, those of 4 milliseconds",
        source=TRTLLM,
    )
    batch_wait_timeout_ms: float = option(
        0.0,
        "Longest wait for more requests before an iteration begins.",
        unit="milliseconds",
        at_least=0,
        source=TRTLLM,
    )
    batch_wait_timeout_iters: int = option(
        0, "Iterations a prompt may be held back for a fuller batch.", unit="iterations", at_least=0, source=TRTLLM
    )
    batch_wait_max_tokens_ratio: float = option(
        0.0, "Share of `option.max_num_tokens` at which a held back batch starts.", at_least=0, at_most=1, source=TRTLLM
    )
