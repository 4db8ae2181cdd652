"""A prompt with images that OpenVINO's processor refuses ends its own request only."""

from __future__ import annotations

import pytest

from djl_trtllm.backends.openvino.image_prompts import refusal
from djl_trtllm.executor.protocol import Refusal


@pytest.mark.parametrize(
    ("error", "told"),
    [(RuntimeError("Check failed:\nno such image\n"), "no such image"), (IndexError(), "IndexError")],
)
def test_what_is_wrong_with_a_prompt_is_its_clients_to_change(error: Exception, told: str) -> None:
    found = refusal(error)
    assert isinstance(found, Refusal)
    assert told in str(found)


def test_too_little_memory_is_no_fault_of_the_prompt() -> None:
    found = refusal(MemoryError("std::bad_alloc"))
    assert not isinstance(found, Refusal)
    assert "std::bad_alloc" in found
