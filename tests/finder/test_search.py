"""The search finds the largest fitting number in as few trials as a binary search needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.finder.measure import Search, candidates, most_trials
from tests.support.tables import by_table


def run(numbers: Sequence[int], bound: int, guess: int | None = None) -> tuple[int | None, list[int]]:
    """The result where numbers up to `bound` fit, and the numbers that were tried."""
    search = Search.over(numbers, guess)
    tried: list[int] = []
    while (number := search.next) is not None:
        tried.append(number)
        search = search.after(number, number <= bound)
    return search.found, tried


@pytest.mark.parametrize(("numbers", "trials"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (1000, 10)])
def test_a_search_needs_the_logarithm_of_its_results(numbers: int, trials: int) -> None:
    assert most_trials(numbers) == trials
    found = [run(range(1, numbers + 1), bound) for bound in range(numbers + 1)]
    assert [result for result, _ in found] == [None, *range(1, numbers + 1)]
    assert max(len(tried) for _, tried in found) == trials


@given(
    st.integers(1, 3000).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size), st.integers(-5, 2 * size)))
)
def test_with_any_guess_it_finds_the_bound_in_no_more_trials(case: tuple[int, int, int]) -> None:
    size, bound, guess = case
    found, tried = run(range(1, size + 1), bound, guess)
    assert found == (bound or None)
    assert len(tried) == len(set(tried)) <= most_trials(size)


def test_a_good_guess_saves_trials_and_a_bad_one_costs_none() -> None:
    numbers = candidates(64, 1 << 20, 0.01)
    assert most_trials(len(numbers)) == 11
    assert len(run(numbers, 24_000)[1]) >= 10 > len(run(numbers, 24_000, guess=25_000)[1])
    for guess in (1, 5_000, 900_000, 10**9):
        for bound in (0, 64, 24_000, 1 << 20):
            found, tried = run(numbers, bound, guess)
            assert found == max((number for number in numbers if number <= bound), default=None)
            assert len(tried) <= 11


def test_candidates_are_every_number_or_a_share_apart() -> None:
    assert list(candidates(3, 7, 0)) == [3, 4, 5, 6, 7]
    assert candidates(5, 5, 0.1) == [5]
    numbers = candidates(10, 1000, 0.25)
    assert (numbers[0], numbers[-1]) == (10, 1000)
    assert numbers == sorted(set(numbers))
    assert all(after <= max(before + 1, before * 1.25) for before, after in itertools.pairwise(numbers))


def test_trials_that_are_known_already_are_not_repeated_and_those_in_another_order_are_of_use() -> None:
    numbers = range(1, 1001)
    _, tried = run(numbers, 333)
    search = Search.over(numbers)
    assert search.bracket == (None, None)
    for number in tried[:4]:
        search = search.after(number, number <= 333)
    assert (search.next, search.left) == (tried[4], most_trials(1000) - 4)
    search = Search.over(numbers, guess=500)
    for number, bracket in ((10, (10, None)), (900, (10, 900)), (400, (10, 400)), (5, (10, 400))):
        search = search.after(number, number <= 333)
        assert search.bracket == bracket
    while (tokens := search.next) is not None:
        search = search.after(tokens, tokens <= 333)
    assert search.found == 333


@by_table("bound", "tried")
def test_after_a_guess_the_steps_are_a_tenth_of_it_and_grow_twofold(bound: int, tried: list[int]) -> None:
    found, numbers = run(range(1, 8193), bound, guess=tried[0])
    assert numbers[: len(tried)] == tried
    assert found == (bound or None)


def test_what_is_known_already_replaces_the_guess_once_it_is_on_both_sides() -> None:
    search = Search.over(range(1, 1026), guess=500).after(1, True)
    assert search.next == 51
    assert search.after(60, False).next == 30
