"""The places in one engine process."""

from __future__ import annotations

import pytest

from djl_trtllm.batching.clients import Client
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


def test_one_of_16_places_and_blocks_is_a_reserve_but_never_the_only_place() -> None:
    made = [Places(FakeExecutor(Limits(number, 10 * number, 32, 100)), number) for number in (1, 2, 16, 32, 40)]
    assert [(each.reserve, each.reserved_blocks) for each in made] == [(0, 0), (1, 1), (1, 10), (2, 20), (2, 25)]


def test_they_would_fit_without_what_their_client_has() -> None:
    some = places(10)
    for _ in range(4):
        some.take(2)
    assert some.fit_alone(Client("a", running=2, blocks=4), 2, 6)
    assert not some.fit_alone(Client("a", running=2, blocks=4), 3, 6)
    assert not some.fit_alone(Client("a", running=2, blocks=4), 2, 7)


def taken(sequences: int, blocks: int = 0, kv_blocks: int = 0, lookahead: int = 0) -> Places:
    """Some of 32 places, of which two are the reserve, and of the blocks."""
    some = Places(FakeExecutor(Limits(32, kv_blocks, 32, 100)), 32, lookahead)
    some.sequences, some.blocks = sequences, blocks
    return some


LITTLE, MUCH = 16, 17
"""Sequences that a client asks for."""


@pytest.mark.parametrize(
    ("running", "admitted", "of_its_own", "sequences", "fit"),
    [
        (29, MUCH, 5, 1, True),
        (30, MUCH, 5, 1, False),
        (30, MUCH, 0, 1, False),
        (31, LITTLE, 0, 1, True),
        (32, LITTLE, 0, 1, False),
        (30, LITTLE, 1, 1, True),
        (30, LITTLE, 2, 1, False),
        (29, LITTLE, 2, 1, True),
        (0, 31, 0, 31, True),
        (1, 31, 0, 30, False),
        (1, 31, 0, 31, True),
    ],
)
def test_the_last_places_are_for_clients_that_ask_for_little_and_for_what_needs_them(
    running: int, admitted: int, of_its_own: int, sequences: int, fit: bool
) -> None:
    client = Client("a", admitted=admitted, running=of_its_own)
    assert taken(running).fit_among_others(client, sequences, 1) is fit


@pytest.mark.parametrize(
    ("blocks", "admitted", "of_its_own", "asked", "fit"),
    [
        (140, MUCH, 50, 10, True),
        (141, MUCH, 50, 10, False),
        (141, MUCH, 0, 10, False),
        (150, LITTLE, 0, 10, True),
        (151, LITTLE, 0, 10, False),
        (150, LITTLE, 3, 7, True),
        (150, LITTLE, 4, 7, False),
        (0, MUCH, 0, 151, True),
    ],
)
def test_the_last_blocks_are_for_them_too(blocks: int, admitted: int, of_its_own: int, asked: int, fit: bool) -> None:
    client = Client("a", admitted=admitted, running=bool(of_its_own), blocks=of_its_own)
    assert taken(5, blocks, kv_blocks=160).fit_among_others(client, 1, asked) is fit


def test_with_few_places_one_sequence_is_little() -> None:
    some = Places(FakeExecutor(Limits(2, 0, 32, 100)), 2)
    some.take(0)
    assert some.fit_among_others(Client("a", admitted=1), 1, 0)
    assert not some.fit_among_others(Client("a", admitted=2), 1, 0)


def test_among_others_nothing_waits_inside_the_executor_unless_it_is_alone_there() -> None:
    client = Client("a", admitted=1)
    assert taken(31, lookahead=4).fit_among_others(client, 1, 0)
    assert not taken(32, lookahead=4).fit_among_others(client, 1, 0)
    assert not taken(1, lookahead=4).fit_among_others(client, 33, 0)
    assert taken(0, lookahead=4).fit_among_others(client, 33, 0)
