"""How much memory the bodies of requests may have."""

from __future__ import annotations

import pytest

from djl_trtllm.errors import OverloadedError
from djl_trtllm.server.body_memory import BodyMemory


def test_one_body_may_have_half_of_the_memory() -> None:
    memory = BodyMemory(100)
    assert memory.take(0, 30)
    assert memory.take(30, 20)
    assert not memory.take(50, 1)
    assert memory.used == 50
    assert not BodyMemory(100).take(0, 51)


def test_a_body_may_have_what_is_free_after_it() -> None:
    memory = BodyMemory(100)
    assert memory.take(0, 50)
    assert memory.take(0, 25)
    assert not memory.take(25, 1)
    assert memory.take(0, 12)
    assert memory.used == 87


def test_what_is_released_is_free_again() -> None:
    memory = BodyMemory(100)
    assert memory.take(0, 50)
    memory.release(50)
    assert memory.used == 0
    assert memory.take(0, 50)


def test_there_is_no_limit_unless_one_is_given() -> None:
    assert BodyMemory().take(0, 1 << 60)


def test_a_block_holds_a_body_and_releases_it_whatever_happens() -> None:
    memory = BodyMemory(100)
    with pytest.raises(KeyError), memory.holding(50):
        assert memory.used == 50
        with (
            pytest.raises(OverloadedError, match="have 50 of max_body_memory=100 bytes") as refused,
            memory.holding(26),
        ):
            pytest.fail("there is no room")
        assert (refused.value.queue_depth, refused.value.capacity, refused.value.retry_after) == (50, 100, 1)
        raise KeyError
    assert memory.used == 0
