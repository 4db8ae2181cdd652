from __future__ import annotations

from djl_trtllm.api.lmi.finish_reasons import FINISH_REASONS
from djl_trtllm.request import FinishReason


def test_every_finish_reason_has_the_lmi_schemas_name() -> None:
    names = ["eos_token", "stop_sequence", "length", "cancelled", "error"]
    assert [FINISH_REASONS[reason] for reason in FinishReason] == names
