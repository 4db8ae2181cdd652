"""Which requests run in an iteration, and what of them."""

from __future__ import annotations

from typing import Annotated

from djl_trtllm.config.options.choices import BatchingType, ChunkingPolicy, SchedulerPolicy
from djl_trtllm.config.options.documents import DJL, LMI, RUNTIME, TRITON, TRTLLM
from djl_trtllm.config.options.group import OptionGroup
from djl_trtllm.config.options.option import Option


class SchedulerOptions(OptionGroup):
    """Policies of the scheduler, chunked prefill, overlap and waiting."""

    batch_scheduler_policy: Annotated[
        SchedulerPolicy,
        Option(
            "option.batch_scheduler_policy",
            "`max_utilization` starts as many sequences as fit now and may pause some later; `guaranteed_no_evict` "
            "starts only what fits to its end; `static_batch` finishes a whole batch before the next one (a legacy "
            "mode).",
            aliases=("option.capacity_scheduler_policy",),
            source=f"{LMI}, {RUNTIME}",
        ),
    ] = SchedulerPolicy.MAX_UTILIZATION
    context_chunking_policy: Annotated[
        ChunkingPolicy | None,
        Option(
            "option.context_chunking_policy",
            "Order of the chunks of prompts under chunked prefill: all of the first request first, or all requests "
            "alike.",
            example="first_come_first_served",
            default_note="first_come_first_served",
            source=RUNTIME,
        ),
    ] = None
    enable_chunked_prefill: Annotated[
        bool,
        Option(
            "option.enable_chunked_prefill",
            "Split long prompts over several iterations, so that a prompt may be longer than `option.max_num_tokens`.",
            aliases=("option.enable_chunked_context",),
            source=f"{TRTLLM}, {DJL}",
        ),
    ] = False
    batching_type: Annotated[
        BatchingType | None,
        Option(
            "option.batching_type",
            "`inflight` lets requests join a running batch, `static` runs batch after batch.",
            aliases=(
                "option.gpt_model_type",
                "option.batching_strategy",
            ),
            value_aliases={"v1": "static", "inflight_batching": "inflight", "inflight_fused_batching": "inflight"},
            example="inflight",
            default_note="inflight",
            source=f"{TRITON}, {TRTLLM}",
        ),
    ] = None
    enable_overlap_scheduler: Annotated[
        bool | None,
        Option(
            "option.enable_overlap_scheduler",
            "Prepare the next iteration while the GPU runs the current one. The PyTorch backend's scheduler; not the "
            "option of early engines.",
            example="true",
            default_note="the engine's own: on",
            source=DJL,
        ),
    ] = None
    disable_overlap_scheduler: Annotated[
        bool,
        Option(
            "option.disable_overlap_scheduler",
            "Do not overlap iterations; `option.enable_overlap_scheduler` overrides it.",
            source=TRTLLM,
        ),
    ] = False
    enable_batch_size_tuning: Annotated[
        bool | None,
        Option(
            "option.enable_batch_size_tuning",
            "Let the engine adapt its batch to the traffic.",
            example="true",
            default_note="the engine's own: on",
            source=TRTLLM,
        ),
    ] = None
    enable_max_num_tokens_tuning: Annotated[
        bool | None,
        Option(
            "option.enable_max_num_tokens_tuning",
            "Let the engine adapt the tokens of an iteration to the traffic.",
            example="false",
            default_note="the engine's own: off",
            source=TRTLLM,
        ),
    ] = None
    dynamic_batch_moving_average_window: Annotated[
        int | None,
        Option(
            "option.dynamic_batch_moving_average_window",
            "Iterations over which the traffic is averaged for dynamic batch tuning.",
            unit="iterations",
            at_least=1,
            example="128",
            default_note="the engine's own: 128",
            source=TRTLLM,
        ),
    ] = None
    stream_interval: Annotated[
        int,
        Option(
            "option.stream_interval",
            "Iterations between two messages of a stream. Larger saves work and makes streams coarser.",
            unit="iterations",
            at_least=1,
            source=TRTLLM,
        ),
    ] = 1
    batch_wait_timeout_ms: Annotated[
        float,
        Option(
            "option.batch_wait_timeout_ms",
            "Longest wait for more requests before an iteration begins.",
            unit="milliseconds",
            at_least=0,
            source=TRTLLM,
        ),
    ] = 0.0
    batch_wait_timeout_iters: Annotated[
        int,
        Option(
            "option.batch_wait_timeout_iters",
            "Iterations a prompt may be held back for a fuller batch.",
            unit="iterations",
            at_least=0,
            source=TRTLLM,
        ),
    ] = 0
    batch_wait_max_tokens_ratio: Annotated[
        float,
        Option(
            "option.batch_wait_max_tokens_ratio",
            "Share of `option.max_num_tokens` at which a held back batch starts.",
            at_least=0,
            at_most=1,
            source=TRTLLM,
        ),
    ] = 0.0
