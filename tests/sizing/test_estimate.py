from __future__ import annotations

from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import GIB, Conditions, estimate
from tests.sizing.configs import llama

LLAMA = CheckpointSizes.from_config(llama())


def test_weights_are_divided_among_the_ranks() -> None:
    one = estimate(LLAMA, Conditions(24 * GIB))
    four = estimate(LLAMA, Conditions(24 * GIB, tensor_parallel=4))
    assert one.weights == 16_060_522_496
    assert one.weights / 4 < four.weights < one.weights / 3


def test_the_maximum_is_the_last_that_fits() -> None:
    found = estimate(LLAMA, Conditions(24 * GIB))
    assert found.kv_tokens(found.max_num_tokens) >= found.longest(found.max_num_tokens)
    assert found.kv_tokens(found.max_num_tokens + 1) < found.longest(found.max_num_tokens + 1)
    assert found.recommended == min(found.max_num_tokens // 2, 16_384)
    assert found.warnings == ()


def test_what_does_not_fit_is_said_with_its_numbers() -> None:
    found = estimate(LLAMA, Conditions(12 * GIB))
    assert (found.max_num_tokens, found.recommended) == (0, 0)
    assert "does not fit" in found.warnings[0]
    assert "12.0 GiB" in found.warnings[0]
