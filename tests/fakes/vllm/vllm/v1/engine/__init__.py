from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors


class FinishReason(IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass
class EngineCoreRequest:
    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams | None
    lora_request: LoRARequest | None
    external_req_id: str | None = None
    cache_salt: str | None = None
    pooling_params: PoolingParams | None = None


@dataclass
class EngineCoreOutput:
    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsTensors | None = None
    finish_reason: FinishReason | None = None
    prefill_stats: PrefillStats | None = None
    pooling_output: Any = None
    spec_decode_metrics: RequestSpecDecodeMetrics | None = None


@dataclass
class EngineCoreOutputs:
    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
