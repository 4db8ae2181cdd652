"""The LMI schema's names of the finish reasons."""

from __future__ import annotations

from djl_trtllm.request import FinishReason

FINISH_REASONS: dict[FinishReason, str] = {
    FinishReason.END_TOKEN: "eos_token",
    FinishReason.STOP: "stop_sequence",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "cancelled",
    FinishReason.ERROR: "error",
}
