"""Responses of vectors and scores."""

from __future__ import annotations

import numpy as np
import pytest

from djl_trtllm.api.dialects.rerank import ScoreEncoder
from djl_trtllm.api.pooling import score_of
from djl_trtllm.request import FinishReason, OutputChunk, SequenceResult

ENDED = SequenceResult(FinishReason.CANCELLED, 0, None, None)


def test_an_end_without_a_vector_is_no_result() -> None:
    encoder = ScoreEncoder(2, "story", 0)
    score = np.float32(0.25).tobytes()
    assert encoder.encode(OutputChunk(0, [], ENDED)) == b""
    assert encoder.encode(OutputChunk(0, [], ENDED, generation=1, vector=score)) == b""
    assert b'"score":0.25' in encoder.encode(OutputChunk(0, [], ENDED, vector=score))


@pytest.mark.parametrize("score", [0.1, -3.5, 1e-30, float("inf")])
def test_a_score_has_the_digits_of_its_32_bits(score: float) -> None:
    assert score_of(np.float32(score).tobytes()) == score
