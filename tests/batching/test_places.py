"""The places in one engine process."""

from __future__ import annotations

from djl_trtllm.batching.places import Places
from djl_trtllm.executor.protocol import Limits
from tests.batching.helpers import FakeExecutor


def places(kv_blocks: int) -> Places:
    return Places(FakeExecutor(Limits(4, kv_blocks, 32, 100)), 4)


def test_sequences_fit_up_to_the_number_of_places() -> None:
    some = places(0)
    for _ in range(3):
        some.take(1000)
    assert some.fit(1, 1000)
    assert not some.fit(2, 2000)
    some.free(1000)
    assert some.fit(2, 2000)


def test_sequences_fit_into_the_blocks_that_there_are() -> None:
    some = places(10)
    some.take(4)
    assert some.fit(1, 6)
    assert not some.fit(1, 7)
    some.free(4)
    assert some.fit(1, 10)
