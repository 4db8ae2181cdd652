"""Executors of vectors: which requests share an iteration, and what each is answered with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st

from djl_trtllm.executor.pooling import LEAST_FILLED, PoolingExecutor, Vectors, next_batch
from djl_trtllm.executor.protocol import Limits, Stats, Submit
from djl_trtllm.request import FinishReason, Pooling, Sampling, TaskName
from tests.support.tables import by_rows

MOST = 64


def request(number: int, tokens: int, pooling: Pooling = Pooling()) -> Submit:  # noqa: B008  immutable
    return Submit(number, list(range(1, tokens + 1)), Sampling(), pooling=pooling)


def of_eight(tokens: int) -> int:
    return -(-tokens // 8) * 8


class Lengths(PoolingExecutor):
    """The vector of a text is (3, 4 times its length)."""

    def __init__(self, task: TaskName = "embed", *, activates: bool = True) -> None:
        super().__init__(
            task=task, activates=activates, dimensions=2, max_sequences=8, max_seq_len=MOST, max_num_tokens=MOST
        )
        self.batches: list[list[int]] = []

    def compute(self, batch: Sequence[Submit]) -> Vectors:
        self.batches.append([each.request_id for each in batch])
        return np.array([[3, 4 * len(each.prompt_ids)] for each in batch], np.float32)


def answers(executor: PoolingExecutor) -> dict[int, list[float]]:
    """Return the responses, all of which end by length."""
    found: dict[int, list[float]] = {}
    while executor.busy:
        step = executor.step()
        assert [end.request_id for end in step.ends] == list(step.vectors)
        assert {end.finish for end in step.ends} == {FinishReason.LENGTH}
        found |= {number: np.frombuffer(vector, np.float32).tolist() for number, vector in step.vectors.items()}
    return found


@given(st.lists(st.integers(1, MOST), min_size=1, max_size=40))
def test_an_iteration_has_the_oldest_request_and_is_bounded_in_tokens_and_padding(lengths: list[int]) -> None:
    waiting = [request(number, length) for number, length in enumerate(lengths)]
    batch = next_batch(waiting, MOST, of_eight)
    taken = [len(each.prompt_ids) for each in batch]
    assert waiting[0] in batch
    if len(batch) > 1:
        computed = len(batch) * of_eight(max(taken))
        assert computed <= MOST
        assert sum(map(of_eight, taken)) >= LEAST_FILLED * computed
    others = sorted(length for number, length in enumerate(lengths) if waiting[number] not in batch)
    assert not [length for length in others if of_eight(min(taken)) < of_eight(length) < of_eight(max(taken))]


@by_rows("tokens", range(1, 20))
def test_prompts_of_one_length_fill_an_iteration_whatever_they_are_rounded_up_to(tokens: int) -> None:
    waiting = [request(number, tokens) for number in range(256)]
    assert len(next_batch(waiting, 1024, of_eight)) == 1024 // of_eight(tokens)


@by_rows(
    ("lengths", "taken"),
    [
        ((16, 24, 40), [16, 24]),
        ((40, 8, 16, 32), [32, 40]),  # from 40 down: 16 is too short to be computed as 40
        ((24, 8, 16, 32), [24, 32]),  # of equally near ones the longer
        ((24, 8, 16, 40), [16, 24]),
        ((48, 32), [48]),  # both would be 96 tokens
    ],
)
def test_the_first_request_takes_those_of_the_nearest_lengths_with_it(
    lengths: tuple[int, ...], taken: list[int]
) -> None:
    waiting = [request(number, tokens) for number, tokens in enumerate(lengths)]
    assert [len(each.prompt_ids) for each in next_batch(waiting, 80, of_eight)] == taken


def test_requests_of_like_lengths_share_an_iteration() -> None:
    executor = Lengths()
    assert executor.limits == Limits(8, 0, 1, MOST, task="embed", dimensions=2)
    for number, tokens in enumerate((4, 60, 4, 5, 58, 4)):
        executor.submit(request(number, tokens))
    answers(executor)
    assert [sorted(batch) for batch in executor.batches] == [[0, 2, 3, 5], [1], [4]]


@pytest.mark.parametrize(
    ("pooling", "vector"),
    [
        (Pooling(), [0.6, 0.8]),
        (Pooling(activate=False), [3, 4]),
        (Pooling(dimensions=1), [1]),
        (Pooling(activate=False, dimensions=1), [3]),
    ],
)
def test_a_vector_is_cut_and_then_normalised(pooling: Pooling, vector: list[float]) -> None:
    executor = Lengths()
    executor.submit(request(7, 1, pooling))
    assert answers(executor)[7] == pytest.approx(vector)


def test_the_model_decides_about_what_a_request_does_not_say() -> None:
    executor = Lengths(activates=False)
    executor.submit(request(0, 1))
    executor.submit(request(1, 1, Pooling(activate=True)))
    assert answers(executor) == {0: [3, 4], 1: pytest.approx([0.6, 0.8])}


def test_a_score_goes_through_a_sigmoid() -> None:
    executor = Lengths("score")
    executor.submit(request(0, 1, Pooling("score")))
    executor.submit(request(1, 1, Pooling("score", activate=False)))
    found = answers(executor)
    assert found[0][0] == pytest.approx(1 / (1 + np.exp(-3)))
    assert found[1][0] == 3
    without = Lengths("score", activates=False)
    without.submit(request(0, 1, Pooling("score", activate=True)))
    assert answers(without)[0] == found[0]


def test_a_cancelled_request_ends_once_and_is_not_computed() -> None:
    executor = Lengths()
    executor.submit(request(0, 60))
    executor.submit(request(1, 3))
    executor.cancel(1)
    executor.cancel(1)
    executor.cancel(5)
    assert executor.stats() == Stats(running=1)
    step = executor.step()
    ends = [(end.request_id, end.finish) for end in step.ends]
    assert ends == [(1, FinishReason.CANCELLED), (0, FinishReason.LENGTH)]
    assert list(step.vectors) == [0]
    assert not executor.busy


def test_a_vector_of_zeros_stays_one() -> None:
    class Zeros(Lengths):
        def compute(self, batch: Sequence[Submit]) -> Vectors:
            return np.zeros((len(batch), 2), np.float32)

    executor = Zeros()
    executor.submit(request(0, 1))
    assert answers(executor)[0] == [0, 0]


@by_rows(("task", "activate"), [("embed", None), ("embed", False), ("score", None), ("score", False)])
@by_rows("number", [np.nan, np.inf])
def test_a_vector_that_is_not_finite_fails_its_request_alone(
    task: TaskName, activate: bool | None, number: float
) -> None:
    class Overflows(Lengths):
        def compute(self, batch: Sequence[Submit]) -> Vectors:
            return np.array([[number if each.request_id else 1, 2] for each in batch], np.float32)

    executor = Overflows(task)
    for request_id in range(2):
        executor.submit(request(request_id, 1, Pooling(task, activate)))
    step = executor.step()
    ends = {end.request_id: (end.finish, end.error) for end in step.ends}
    assert ends[0] == (FinishReason.LENGTH, None) and ends[1][0] is FinishReason.ERROR
    assert "not finite" in str(ends[1][1])
    assert list(step.vectors) == [0]
