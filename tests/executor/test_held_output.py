from __future__ import annotations

import pytest

from djl_trtllm.executor.held_output import HeldOutput
from djl_trtllm.executor.protocol import Delta
from djl_trtllm.request import FinishReason


class Iterations:
    """Iterations of a quarter of a second, each with the next number for every sequence that is named."""

    def __init__(self, iterations: int = 1, seconds: float = 0.0) -> None:
        self.now = 100.0
        self.number = 0
        self.held = HeldOutput(iterations, seconds, lambda: self.now)

    def run(self, *request_ids: int, ends: int | None = None) -> dict[int, list[int]]:
        """What is sent after an iteration in which `ends` ends."""
        self.now += 0.25
        self.number += 1
        reasons = {ends: FinishReason.LENGTH}
        sent = self.held.add([Delta(each, [self.number], None, reasons.get(each)) for each in request_ids])
        assert all(bool(delta.finish) == (delta.request_id == ends) for delta in sent)
        return {delta.request_id: delta.token_ids for delta in sent}


def test_without_an_interval_each_iteration_is_sent() -> None:
    iterations = Iterations()
    assert [iterations.run(1, 2) for _ in range(3)] == [{1: [n], 2: [n]} for n in (1, 2, 3)]
    deltas = [Delta(1, [4])]
    assert iterations.held.add(deltas) is deltas  # nothing is done for them


def test_every_nth_iteration_brings_the_tokens_of_n() -> None:
    iterations = Iterations(3)
    sent = [iterations.run(1, 2) for _ in range(7)]
    assert sent[0] == {1: [1], 2: [1]}
    assert sent[1:] == [{}, {1: [2, 3], 2: [2, 3]}, {}, {}, {1: [4, 5, 6], 2: [4, 5, 6]}, {}]


def test_two_iterations_are_the_shortest_interval() -> None:
    iterations = Iterations(2)
    assert [iterations.run(1) for _ in range(4)] == [{1: [1]}, {1: [2]}, {}, {1: [3, 4]}]


def test_output_waits_until_the_seconds_have_gone_by() -> None:
    iterations = Iterations(seconds=0.75)
    sent = [iterations.run(1) for _ in range(6)]
    assert sent == [{1: [1]}, {}, {1: [2, 3]}, {}, {}, {1: [4, 5, 6]}]


@pytest.mark.parametrize(("iterations", "seconds"), [(4, 0.5), (2, 1.0)])
def test_output_waits_for_both_iterations_and_seconds(iterations: int, seconds: float) -> None:
    run = Iterations(iterations, seconds).run
    assert [bool(run(1)) for _ in range(8)] == [True, False, False, True, False, False, False, True]


def test_a_beginning_is_sent_at_once_and_nothing_else_with_it() -> None:
    iterations = Iterations(4)
    assert iterations.run(1) == {1: [1]}
    assert iterations.run(1, 2) == {2: [2]}
    assert iterations.run(1, 2) == {}
    assert iterations.run(1, 2) == {1: [2, 3, 4], 2: [3, 4]}


def test_an_end_is_sent_at_once_with_what_was_held_back_of_its_sequence() -> None:
    iterations = Iterations(5)
    iterations.run(1, 2)
    iterations.run(1, 2)
    assert iterations.run(1, 2, ends=1) == {1: [2, 3]}
    assert iterations.run(2) == {}
    assert iterations.run(2) == {2: [2, 3, 4, 5]}


def test_an_id_that_is_used_again_begins_again() -> None:
    iterations = Iterations(9)
    assert iterations.run(1) == {1: [1]}
    assert iterations.run(1, ends=1) == {1: [2]}
    assert iterations.run(1) == {1: [3]}


def test_one_iteration_may_begin_and_end_a_sequence() -> None:
    iterations = Iterations(9)
    assert iterations.run(1, ends=1) == {1: [1]}
    assert iterations.run(1) == {1: [2]}


def test_what_is_merged_has_all_log_probabilities_and_the_last_reason() -> None:
    held = HeldOutput(9, 0.0)
    first = Delta(1, [1], [-0.1], cached_tokens=4)
    assert held.add([first]) == [first]
    assert held.add([Delta(1, [2], [-0.2])]) == []
    assert held.add([Delta(1, [3], [-0.3])]) == []
    assert held.add([Delta(1, [], None, FinishReason.ERROR, "lost")]) == [
        Delta(1, [2, 3], [-0.2, -0.3], FinishReason.ERROR, "lost")
    ]


def test_what_is_held_back_can_be_taken_and_the_count_begins_anew() -> None:
    iterations = Iterations(3)
    iterations.run(1)
    iterations.run(1)
    assert iterations.held.take_all() == [Delta(1, [2])]
    assert iterations.held.take_all() == []
    assert [iterations.run(1) for _ in range(3)] == [{}, {}, {1: [3, 4, 5]}]
