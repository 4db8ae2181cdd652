"""The first guess at max_num_tokens of LMI's document, from the traffic alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from djl_trtllm.errors import SizingError

DEFAULT_ALPHA = 0.2
LEAST_WORTH_TRYING = 256
"""Halving ends here: smaller values split every prompt into many iterations."""


def guess_max_num_tokens(max_batch_size: int, max_input_len: int, alpha: float = DEFAULT_ALPHA) -> int:
    """`max_batch_size * max_input_len * alpha`, rounded down, at least 1. Raises SizingError for impossible numbers.

    NVIDIA recommends an alpha of 0.1 to 0.2 (TensorRT-LLM 0.9, docs/source/perf_best_practices.md, "Maximum number of
    tokens").
    """
    for name, value in (("max batch size", max_batch_size), ("max input length", max_input_len)):
        if value < 1:
            raise SizingError(f"{name} {value}: expected at least 1")
    if not 0 < alpha <= 1:
        raise SizingError(f"alpha {alpha:g}: expected more than 0 and at most 1; NVIDIA recommends 0.1 to 0.2")
    # As the decimal that was written: 100 * 0.29 is 29, and not 28.999...
    return max(1, math.floor(max_batch_size * max_input_len * Fraction(repr(alpha))))


def halvings(max_num_tokens: int) -> Iterator[int]:
    """The values to try one after the other, until the engine loads: the guess, then half of the last one."""
    yield max_num_tokens
    while max_num_tokens // 2 >= LEAST_WORTH_TRYING:
        max_num_tokens //= 2
        yield max_num_tokens
