"""The record of a request."""

from __future__ import annotations

import pytest

from djl_trtllm.batching.request_record import RequestRecord
from djl_trtllm.request import Origin

TIMES = {
    "queue_time": ("arrived", "started", 2),
    "time_to_first_token": ("arrived", "first_token_at", 6),
    "prefill_time": ("started", "first_token_at", 4),
    "decode_time": ("first_token_at", "last_token_at", 8),
    "inference_time": ("started", "last_token_at", 12),
    "total_time": ("arrived", "ended", 30),
}


@pytest.mark.parametrize(("sequences", "tokens", "seconds"), [(1, 5, 2.0), (2, 10, 2.0), (1, 1, None), (2, 2, None)])
def test_the_first_token_of_a_sequence_has_no_time_before_it(
    sequences: int, tokens: int, seconds: float | None
) -> None:
    record = RequestRecord(Origin(), 100, 3, sequences, first_token_at=106, last_token_at=114, generated_tokens=tokens)
    assert record.time_per_output_token == seconds
    record.first_token_at = None
    assert record.time_per_output_token is None


@pytest.mark.parametrize("name", TIMES)
def test_a_duration_is_known_when_both_of_its_ends_are(name: str) -> None:
    record = RequestRecord(Origin(), 100, 3, 1, started=102, first_token_at=106, last_token_at=114, ended=130)
    begin, end, seconds = TIMES[name]
    assert getattr(record, name) == seconds
    for missing in {begin, end} - {"arrived"}:
        was = getattr(record, missing)
        setattr(record, missing, None)
        assert getattr(record, name) is None
        setattr(record, missing, was)
