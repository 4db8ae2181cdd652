"""LMI's formula, and halving what it gives."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import SizingError
from djl_trtllm.sizing.formula import guess_max_num_tokens, halvings


def test_the_guess_is_batch_times_input_times_alpha() -> None:
    assert guess_max_num_tokens(128, 3700) == 94720
    assert guess_max_num_tokens(128, 3700, 0.1) == 47360
    assert guess_max_num_tokens(128, 3700, 1) == 473600
    assert guess_max_num_tokens(100, 1, 0.29) == 29
    assert guess_max_num_tokens(1, 1, 0.1) == 1


@pytest.mark.parametrize("alpha", [0, -0.1, 1.001, float("nan")])
def test_alpha_is_above_0_and_at_most_1(alpha: float) -> None:
    with pytest.raises(SizingError, match=r"expected more than 0 and at most 1; NVIDIA recommends 0\.1 to 0\.2"):
        guess_max_num_tokens(1, 1, alpha)


@pytest.mark.parametrize(("batch", "length", "name"), [(0, 1, "max batch size 0"), (1, -1, "max input length -1")])
def test_a_batch_and_a_length_are_at_least_1(batch: int, length: int, name: str) -> None:
    with pytest.raises(SizingError, match=f"{name}: expected at least 1"):
        guess_max_num_tokens(batch, length)


def test_halving_ends_where_smaller_values_are_not_worth_trying() -> None:
    assert list(halvings(2000)) == [2000, 1000, 500]
    assert list(halvings(512)) == [512, 256]
    assert list(halvings(100)) == [100]
