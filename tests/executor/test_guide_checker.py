"""With a process that does what a guide's text says, in the place of the compiler."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from djl_trtllm.executor.guide_checker import GuideChecker, key_of
from djl_trtllm.executor.guide_process import Verdict
from djl_trtllm.request import Guide, GuideKind


class Clock:
    """Shows the time that a test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def checker(clock: Clock) -> Iterator[GuideChecker]:
    checker = GuideChecker("tests.support.guide_program", "engine", clock=clock)
    yield checker
    checker.close()


def regex(text: str) -> Guide:
    return Guide(GuideKind.REGEX, text)


def ask(checker: GuideChecker, *texts: str) -> None:
    for text in texts:
        checker.check(key_of(regex(text)), regex(text))


def answer(checker: GuideChecker, text: str) -> Verdict:
    while (verdict := checker.verdict(key_of(regex(text)))) is None:
        checker.poll(0.05)
    return verdict


def test_a_process_tries_each_guide_once(checker: GuideChecker) -> None:
    assert [checker.idle] == [True]
    ask(checker, "good", "bad", "good", "bad")
    assert [checker.idle] == [False]
    assert answer(checker, "good").problem is None
    assert answer(checker, "bad").problem == "no good"
    assert [checker.idle] == [True]
    ask(checker, "good", "bad")
    assert [checker.idle] == [True], "both are known"


def test_guides_of_different_kinds_with_the_same_text_are_two() -> None:
    assert len({key_of(Guide(kind, "a")) for kind in GuideKind}) == len(GuideKind)


def test_a_guide_that_ends_the_process_is_refused_and_the_next_one_gets_a_new_process(checker: GuideChecker) -> None:
    ask(checker, "good", "die", "better")
    first = answer(checker, "good").vocabulary
    assert answer(checker, "die").problem == ("it is too large or nested too deep: its compiler ended with status -11")
    assert answer(checker, "better").problem is None
    assert answer(checker, "better").vocabulary != first
    assert not psutil.pid_exists(first)


def test_a_guide_that_takes_too_long_is_refused(checker: GuideChecker, clock: Clock) -> None:
    ask(checker, "good")
    answer(checker, "good")
    ask(checker, "hang", "better")
    clock.advance(10)
    checker.poll(0)
    assert checker.verdict(key_of(regex("hang"))) is None
    clock.advance(0.1)
    assert answer(checker, "hang").problem == "it takes longer than 10 seconds to compile"
    assert answer(checker, "better").problem is None


def test_the_first_guide_has_time_for_the_start_of_the_process(checker: GuideChecker, clock: Clock) -> None:
    ask(checker, "hang")
    clock.advance(70)
    checker.poll(0)
    assert not checker.idle
    clock.advance(0.1)
    checker.poll(0)
    assert checker.idle


def test_a_process_is_replaced_before_it_grows(checker: GuideChecker) -> None:
    pids = set()
    for number in range(257):
        ask(checker, f"good {number}")
        pids.add(answer(checker, f"good {number}").vocabulary)
    assert len(pids) == 2


def test_verdicts_are_forgotten_the_oldest_first(checker: GuideChecker) -> None:
    for number in range(1025):
        ask(checker, f"good {number}")
        answer(checker, f"good {number}")
    assert checker.verdict(key_of(regex("good 1024"))) is not None
    assert checker.verdict(key_of(regex("good 0"))) is None
    assert checker.verdict(key_of(regex("good 1"))) is not None


def test_nothing_is_left_when_it_is_closed(checker: GuideChecker) -> None:
    ask(checker, "good")
    pid = answer(checker, "good").vocabulary
    assert checker.close() is not None
    assert not psutil.pid_exists(pid)
    assert checker.close() is None
