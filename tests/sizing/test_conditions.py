from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.conditions import Conditions, LoraSlots


def test_ranks_are_those_of_tensor_and_pipeline() -> None:
    assert Conditions(1, tensor_parallel=4, pipeline_parallel=2).ranks == 8


@pytest.mark.parametrize(
    "changes", [{"gpu_memory": 0}, {"tensor_parallel": 0}, {"max_batch_size": 0}, {"fraction": 0.0}, {"fraction": 1.5}]
)
def test_impossible_values_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(SizingError, match=next(iter(changes))):
        Conditions(**{"gpu_memory": 1, **changes})


def test_without_more_it_is_an_engine_for_256_sequences_without_beams() -> None:
    usual = Conditions(1)
    assert (usual.backend, usual.max_batch_size, usual.max_beam_width, usual.ranks) == ("tensorrt", 256, 1, 1)
    assert LoraSlots().modules == ("attn_q", "attn_k", "attn_v")
