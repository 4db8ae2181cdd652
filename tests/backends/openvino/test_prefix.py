from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.backends.openvino.prefix import PrefixCacheMirror


def mirror(capacity: int = 100) -> PrefixCacheMirror:
    return PrefixCacheMirror(capacity=capacity, block_size=4)


def test_nothing_is_reused_of_what_was_never_computed() -> None:
    assert mirror().reused_tokens(list(range(20))) == 0


def test_whole_blocks_are_reused_up_to_the_first_difference() -> None:
    cache = mirror()
    cache.remember([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert cache.reused_tokens([1, 2, 3, 4, 5, 6, 7, 8, 99, 100]) == 8
    assert cache.reused_tokens([1, 2, 3, 4, 5, 6, 7, 0, 9, 10]) == 4
    assert cache.reused_tokens([0, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == 0


def test_the_last_prompt_token_is_always_computed() -> None:
    cache = mirror()
    cache.remember([1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.reused_tokens([1, 2, 3, 4, 5, 6, 7, 8]) == 4
    assert cache.reused_tokens([1, 2, 3, 4]) == 0


def test_a_block_counts_only_after_the_same_beginning() -> None:
    cache = mirror()
    cache.remember([1, 1, 1, 1, 5, 6, 7, 8])
    assert cache.reused_tokens([2, 2, 2, 2, 5, 6, 7, 8, 9]) == 0


def test_the_least_recently_used_block_goes_first() -> None:
    cache = mirror(capacity=2)
    cache.remember([1, 1, 1, 1])
    cache.remember([2, 2, 2, 2])
    assert cache.reused_tokens([1, 1, 1, 1, 0]) == 4
    cache.remember([3, 3, 3, 3])
    assert cache.reused_tokens([2, 2, 2, 2, 0]) == 0
    assert cache.reused_tokens([1, 1, 1, 1, 0]) == 4


def test_a_block_that_is_computed_again_is_used_again() -> None:
    cache = mirror(capacity=2)
    for block in (1, 2, 1, 3):
        cache.remember([block] * 4)
    assert [cache.reused_tokens([block] * 4 + [0]) for block in (1, 2, 3)] == [4, 0, 4]


@given(st.lists(st.lists(st.integers(0, 2), max_size=20), max_size=8), st.lists(st.integers(0, 2), max_size=20))
def test_without_eviction_it_reuses_the_longest_remembered_beginning(known: list[list[int]], prompt: list[int]) -> None:
    cache = mirror()
    for token_ids in known:
        cache.remember(token_ids)
    whole = range(4, len(prompt), 4)
    expected = max((end for end in whole if any(ids[:end] == prompt[:end] for ids in known)), default=0)
    assert cache.reused_tokens(prompt) == expected


@given(st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=10))
def test_it_never_holds_more_than_its_capacity(known: list[list[int]]) -> None:
    cache = mirror(capacity=3)
    for token_ids in known:
        cache.remember(token_ids)
        assert len(cache._blocks) <= 3
        assert cache.reused_tokens(token_ids) <= max(0, len(token_ids) - 1)
