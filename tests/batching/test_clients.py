"""What each client has of a rolling batch."""

from __future__ import annotations

import pytest

from djl_trtllm.batching.clients import Client, Clients


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def clients(clock: Clock) -> Clients:
    return Clients(clock)


def admitted(clients: Clients, key: str, sequences: int = 1) -> Client:
    client = clients.find(key)
    clients.admit(client, sequences)
    return client


def test_a_client_is_the_same_one_while_it_is_remembered(clients: Clients) -> None:
    client = admitted(clients, "a", 2)
    client.service = 7
    clients.release(client)
    assert (clients.find("a"), len(clients), clients.remembered) == (client, 1, 0)
    clients.release(client)
    assert (clients.find("a"), len(clients), clients.remembered) == (client, 0, 1)
    admitted(clients, "a")
    assert (clients.find("a"), len(clients), clients.remembered) == (client, 1, 0)


def test_any_number_of_clients_takes_bounded_memory(clients: Clients) -> None:
    for number in range(5000):
        clients.release(admitted(clients, str(number)))
    assert (len(clients), clients.remembered) == (0, 4096)
    assert clients.find("4999").admitted == 0


def test_one_client_is_no_crowd_however_often_it_comes(clients: Clients, clock: Clock) -> None:
    assert not clients.crowded
    for _ in range(3):
        admitted(clients, "a")
        clock.now += 1
    assert not clients.crowded


def test_two_clients_with_requests_are_a_crowd(clients: Clients, clock: Clock) -> None:
    admitted(clients, "a")
    admitted(clients, "b")
    clock.now += 10_000
    assert clients.crowded


def test_a_client_that_has_been_there_counts_for_a_while(clients: Clients, clock: Clock) -> None:
    admitted(clients, "a")
    clock.now += 10_000
    clients.release(admitted(clients, "b"))
    assert clients.crowded
    clock.now += 299
    assert clients.crowded
    clock.now += 2
    assert not clients.crowded


def test_a_client_that_comes_after_another_counts_from_then(clients: Clients, clock: Clock) -> None:
    clients.release(admitted(clients, "a"))
    clock.now += 200
    admitted(clients, "b")
    assert clients.crowded
    clock.now += 101
    admitted(clients, "b")
    assert not clients.crowded


def test_a_full_queue_has_room_for_the_share_of_another_client(clients: Clients) -> None:
    flood = admitted(clients, "flood", 10)
    assert not clients.has_share(flood, 1, 10)
    light = clients.find("light")
    assert clients.has_share(light, 5, 10)
    assert not clients.has_share(light, 6, 10)
    admitted(clients, "light", 4)
    assert clients.has_share(clients.find("light"), 1, 10)
    assert not clients.has_share(clients.find("light"), 2, 10)
    assert not clients.has_share(flood, 1, 10)
    assert not clients.has_share(clients.find("third"), 4, 10)
    assert clients.has_share(clients.find("third"), 3, 10)


def test_clients_that_come_one_after_the_other_do_not_make_the_queue_endless(clients: Clients) -> None:
    total = 0
    for number in range(1000):
        client = clients.find(str(number))
        if total < 100 or clients.has_share(client, 1, 100):
            clients.admit(client, 1)
            total += 1
    assert total == 100
