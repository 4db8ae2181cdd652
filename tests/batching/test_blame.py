"""Who is found guilty of ending engine processes, after how many losses, and who is not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from djl_trtllm.batching.blame import (
    GROUPS,
    LONG,
    LOSSES,
    MOST_REFUSED,
    REFUSED_SECONDS,
    SHORT_LIVES,
    STEADY,
    Blame,
    digest,
)
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Sampling

LENGTH = 100


@dataclass
class Engine:
    """Requests that get a token each tick, in one process after the other. `tokens` are those in the present process.

    A request in `poisons` ends a process instead of getting its token of that number there.
    """

    poisons: Mapping[str, int]
    tokens: dict[str, int]
    held: set[str] = field(default_factory=set)
    new: list[str] = field(default_factory=list)
    """Requests that wait, and start as soon as they may."""
    blame: Blame = field(default_factory=Blame)
    guilty: list[str] = field(default_factory=list)
    losses: int = 0
    ticks: int = 0
    steps: int = 0

    def lose(self) -> None:
        self.losses += 1
        self.steps = 0
        proved = any(count >= 4 for count in self.tokens.values())
        verdict = self.blame.lost(self.tokens, self.ticks, proved=proved)
        everything = {*self.tokens, *self.held}
        if verdict is not None:
            self.guilty.append(verdict.key)
            everything.remove(verdict.key)
        self.tokens = {key: 0 for key in everything if self.blame.runs(key)}
        self.held = everything - {*self.tokens}
        self.start_new()
        self.let_go()

    def let_go(self) -> None:
        released = self.blame.advance(self.tokens, self.held, self.steps)
        free = {*released} if self.blame.searching else {*self.held}
        self.held -= free
        self.tokens |= dict.fromkeys(free, 0)
        self.start_new()

    def start_new(self) -> None:
        while self.new and self.blame.is_open:
            assert self.blame.join(self.new[-1])
            self.tokens[self.new.pop()] = 0

    def tick(self) -> None:
        """An iteration; requests end at their length, and the process may end before."""
        self.ticks += 1
        self.steps += 1
        if any(self.tokens.get(key) == at for key, at in self.poisons.items()):
            self.lose()
            return
        self.tokens = {key: count + 1 for key, count in self.tokens.items()}
        for key, count in list(self.tokens.items()):
            if count >= LENGTH and key != "endless":
                del self.tokens[key]
                self.blame.ended(key)
        self.let_go()

    def run(self) -> None:
        for _ in range(100_000):
            if not self.tokens and not self.held and not self.new:
                return
            self.tick()
        raise AssertionError("it does not end")


def names(count: int) -> list[str]:
    return [f"request {number}" for number in range(count)]


def most(suspects: int) -> int:
    """The losses after which a guilty one is found."""
    losses = LOSSES
    while suspects > GROUPS**2:
        suspects, losses = -(-suspects // GROUPS), losses + 1
    return losses


@given(others=st.lists(st.integers(0, 10), max_size=600), at=st.integers(0, 3), new=st.integers(0, 20))
def test_of_all_requests_only_the_one_that_ends_processes_is_guilty(others: list[int], at: int, new: int) -> None:
    keys = names(len(others))
    engine = Engine({"poison": at}, {**dict(zip(keys, others, strict=True)), "poison": at})
    engine.new = [f"new {number}" for number in range(new)]
    engine.run()
    assert engine.guilty == ["poison"]
    assert engine.losses <= most(len(others) + 1)


def test_it_is_found_in_three_losses_beside_streams_that_go_on() -> None:
    engine = Engine({"poison": 0}, {**dict.fromkeys(names(255), 0), "poison": 0})
    engine.run()
    assert (engine.losses, engine.guilty) == (3, ["poison"])


@given(others=st.integers(0, 40), at=st.integers(4, LONG - 1))
def test_one_that_passes_each_time_is_found_too(others: int, at: int) -> None:
    engine = Engine({"poison": at}, dict.fromkeys([*names(others), "poison"], 0))
    engine.run()
    assert engine.guilty == ["poison"]
    assert engine.losses <= SHORT_LIVES + most(others + 1) + 1


@given(others=st.integers(0, 40), poisons=st.lists(st.integers(0, 3), min_size=2, max_size=5))
def test_several_are_found_one_after_the_other(others: int, poisons: list[int]) -> None:
    guilty = {f"poison {number}": at for number, at in enumerate(poisons)}
    engine = Engine(guilty, dict.fromkeys([*names(others), *guilty], 0))
    engine.run()
    assert sorted(engine.guilty) == sorted(guilty)


@given(kills=st.lists(st.integers(LONG, LENGTH - 1), max_size=12), count=st.integers(1, 40))
def test_kills_from_outside_are_nobodys_fault(kills: list[int], count: int) -> None:
    engine = Engine({}, dict.fromkeys(names(count), 0))
    for ticks in kills:
        for _ in range(ticks):
            engine.tick()
        engine.lose()
        engine.tokens |= dict.fromkeys(names(count), 0)
    engine.run()
    assert engine.guilty == []


# A kill in the very step in which a suspect is tried for the third time looks like its own.
@given(kills=st.lists(st.integers(4, STEADY[-1] - 1), max_size=SHORT_LIVES - 1))
def test_kills_in_quick_succession_are_nobodys_fault_beside_a_stream_that_goes_on(kills: list[int]) -> None:
    engine = Engine({}, {"endless": 0})
    for number, ticks in enumerate(kills):
        engine.new.append(f"new {number}")
        for _ in range(ticks):
            engine.tick()
        engine.lose()
    assert engine.guilty == []


# -- what is remembered ------------------------------------------------------------------------------------------------


def lost(blame: Blame, keys: Iterable[str], times: int = 1, now: float = 0, *, proved: bool = True) -> None:
    """Each key alone ends engine processes, and leaves."""
    for key in keys:
        for _ in range(times):
            blame.lost({key: 0}, now, proved=proved)
            blame.advance({}, (), 0)


def test_a_guilty_one_is_refused_for_ten_minutes() -> None:
    blame = Blame()
    lost(blame, "a", LOSSES, 50)
    assert [blame.refused_for("a", now) for now in (50, 60, 50 + REFUSED_SECONDS, 9999)] == [600, 590, 0, 0]
    assert blame.refused_for("b", 50) == 0


def test_so_many_are_refused_at_most() -> None:
    blame = Blame()
    keys = names(MOST_REFUSED + 1)
    lost(blame, keys, LOSSES)
    assert [key for key in keys if not blame.refused_for(key, 0)] == keys[:1]


@pytest.mark.parametrize(("later", "suspect"), [(0, True), (REFUSED_SECONDS, True), (REFUSED_SECONDS + 1, False)])
def test_what_was_lost_and_left_is_a_suspect_when_it_comes_again(later: float, suspect: bool) -> None:
    blame = Blame()
    lost(blame, "a")
    assert (blame.searching, blame.suspect("b", later)) == (False, False)
    assert (blame.suspect("a", later), blame.searching) == (suspect, suspect)
    assert list(blame.advance({}, {"a"}, 0)) == ["a"] * suspect


def test_what_ends_as_it_should_begins_anew() -> None:
    blame = Blame()
    lost(blame, "a", LOSSES - 1)
    blame.ended("a")
    assert not blame.suspect("a", 0)
    lost(blame, "a", LOSSES - 1)
    assert not blame.refused_for("a", 0)


def test_suspects_that_left_are_remembered_up_to_a_number() -> None:
    blame = Blame()
    keys = names(2 * MOST_REFUSED)
    lost(blame, keys)
    assert sum(blame.suspect(key, 0) for key in keys) in (MOST_REFUSED, MOST_REFUSED + 1)
    assert blame.suspect(keys[-1], 0)


def test_a_verdict_explains_losses_unless_nothing_has_passed_since_the_one_before() -> None:
    blame = Blame()
    lost(blame, "ab", LOSSES - 1, proved=False)
    verdicts = [blame.lost({key: 0}, 0, proved=proved) for key, proved in (("a", False), ("b", False))]
    assert [verdict and verdict.explains for verdict in verdicts] == [True, False]
    lost(blame, "c", LOSSES - 1, proved=False)
    verdict = blame.lost({"c": 0}, 0, proved=True)
    assert verdict is not None and verdict.explains


def test_the_same_input_with_the_same_parameters_is_the_same_request() -> None:
    one = Submit(1, [1, 2, 3], Sampling(max_new_tokens=5, seed=1), origin="a", client="x")
    same = Submit(2, [1, 2, 3], Sampling(max_new_tokens=5, seed=2), origin="b", client="y")
    assert digest(one) == digest(same)
    for other in (
        replace(one, prompt_ids=[1, 2, 4]),
        replace(one, stop_token_ids=[2]),
        replace(one, sampling=Sampling(max_new_tokens=6)),
    ):
        assert digest(other) != digest(one)
