"""Which running sequences give their places to another client."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from djl_trtllm.batching.clients import Client
from djl_trtllm.batching.moving import to_move
from djl_trtllm.batching.places import Places
from djl_trtllm.batching.slot import Slot
from djl_trtllm.executor.protocol import Limits, Submit
from djl_trtllm.request import Sampling
from tests.batching.helpers import FakeExecutor


class Running:
    """Sequences that run in an executor with four places and some in its queue."""

    def __init__(self, lookahead: int = 0, kv_blocks: int = 0) -> None:
        self.places = Places(FakeExecutor(Limits(4, kv_blocks, 10, 1000)), 4, lookahead)
        self.running: dict[int, Slot] = {}
        self.clients: dict[str, Client] = {}

    def slot(self, key: str, *, blocks: int = 1, movable: bool = True, **sampling: Any) -> Slot:
        message = Submit(len(self.running), [1, 2], Sampling(**{"max_new_tokens": 9, **sampling}))
        sequence = SimpleNamespace(finished=None, token_ids=[])
        client = self.clients.setdefault(key, Client(key))
        return Slot(cast(Any, None), cast(Any, sequence), message, blocks, client, movable=movable)

    def add(self, key: str, **more: Any) -> Slot:
        slot = self.running[len(self.running)] = self.slot(key, **more)
        slot.enter(self.places)
        return slot

    def moved(self, clients: int = 2, **light: Any) -> list[int]:
        return list(to_move(self.running, self.slot("light", **light), self.places, clients))


def test_the_last_one_of_the_client_with_most_places_moves() -> None:
    some = Running()
    for key in "aaab":
        some.add(key)
    assert some.moved() == [2]


def test_those_that_wait_inside_the_executor_move_too() -> None:
    some = Running(lookahead=2)
    for _ in range(6):
        some.add("a")
    assert some.moved() == [5, 4, 3]


def test_a_client_keeps_its_share() -> None:
    some = Running()
    for key in "aabb":
        some.add(key)
    assert some.moved(2) == []
    assert some.moved(3) == [1]


def test_nothing_moves_that_would_make_too_little_room() -> None:
    some = Running(kv_blocks=20)
    for _ in range(4):
        some.add("a", blocks=5)
    assert some.moved(blocks=10) == [3, 2]
    assert some.moved(blocks=15) == []
    assert Running().moved() == []


@pytest.mark.parametrize(
    "fixed",
    [
        {"movable": False},
        {"presence_penalty": 0.5},
        {"min_new_tokens": 5},
        {"max_new_tokens": 999},
    ],
    ids=str,
)
def test_what_could_not_go_on_later_stays(fixed: dict[str, Any]) -> None:
    some = Running()
    for _ in range(3):
        some.add("a")
    some.add("a", **fixed)
    assert some.moved() == [2]


def test_a_sequence_moves_twice_at_most_and_not_at_its_end() -> None:
    some = Running()
    for _ in range(4):
        some.add("a")
    some.running[3].moves = 2
    some.running[2].sequence.finished = cast(Any, "ended")
    some.running[1].moves = 1
    assert some.moved() == [1]


def test_as_many_move_as_make_room_and_no_more() -> None:
    some = Running(kv_blocks=20)
    for _ in range(4):
        some.add("a", blocks=5)
    assert some.moved(blocks=5) == [3]


def test_the_oldest_moves_if_no_other_can() -> None:
    some = Running(kv_blocks=20)
    some.add("a", blocks=5)
    for _ in range(3):
        some.add("a", blocks=5, movable=False)
    assert some.moved(blocks=5) == [0]


def test_what_ends_in_another_executor_stays_there() -> None:
    some = Running()
    for _ in range(4):
        some.add("a")
    some.running[3].places = Running().places
    assert some.moved() == [2]
