"""Requests as front ends report them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.batching.statistics import RequestRecord
from djl_trtllm.request import FinishReason, GenerationRequest, RequestOrigin, Sampling
from djl_trtllm.telemetry import ServedRequest
from djl_trtllm.telemetry.reports import Asked

BEGAN = 100.0
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def state(**changes: Any) -> RequestState:
    """Received at 100, queued at 101, running from 103, with tokens from 106 to 110."""
    times = {"started": 103.0, "first_token_at": 106.0, "last_token_at": 110.0, "ended": 110.0}
    rest = {"generated_tokens": 5, "reason": FinishReason.LENGTH}
    return cast(
        RequestState,
        SimpleNamespace(record=RequestRecord(RequestOrigin(), 101.0, 7, 1, **{**times, **rest, **changes})),
    )


def served(*generations: RequestState, status: int | str = 200, **changes: Any) -> ServedRequest:
    """A request of LMI's dialect; without `generations` none."""
    asked = Asked.of(GenerationRequest(prompt="secret text", sampling=Sampling(max_new_tokens=5)))
    return ServedRequest(
        **{
            "id": "r-1",
            "method": "POST",
            "path": "/invocations",
            "dialect": "lmi",
            "model": "story",
            "status": status,
            "asked": asked,
            "generations": generations,
            "began": BEGAN,
            **changes,
        }
    )
