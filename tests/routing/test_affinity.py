from __future__ import annotations

from collections import Counter

from djl_trtllm.routing.affinity import Affinity, ranked

REPLICAS = ["a", "b", "c", "d"]
IDLE = dict.fromkeys(REPLICAS, 0)


def keys(*texts: str) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in texts)


def test_the_replica_with_the_longest_known_beginning_is_chosen() -> None:
    affinity = Affinity(slack=4)
    affinity.learn(keys("1"), "a")
    affinity.learn(keys("1", "2"), "b")
    affinity.learn(keys("1"), "c")
    assert affinity.choose(keys("1", "2", "3"), IDLE) == "b"


def test_of_several_that_had_it_the_least_loaded_is_chosen() -> None:
    affinity = Affinity(slack=4)
    for replica in ("a", "b"):
        affinity.learn(keys("1"), replica)
    assert affinity.choose(keys("1"), {**IDLE, "a": 3, "b": 2}) == "b"
    assert affinity.choose(keys("1"), {**IDLE, "a": 2, "b": 3}) == "a"


def test_a_replica_that_is_out_of_balance_or_gone_is_passed_over() -> None:
    affinity = Affinity(slack=4)
    affinity.learn(keys("1"), "a")
    affinity.learn(keys("1", "2"), "b")
    assert affinity.choose(keys("1", "2"), {"a": 10, "b": 14, "c": 10}) == "b"
    assert affinity.choose(keys("1", "2"), {"a": 10, "b": 15, "c": 10}) == "a"
    assert affinity.choose(keys("1", "2"), {"a": 10, "c": 10}) == "a"


def test_a_turn_does_not_go_to_a_replica_that_is_gone() -> None:
    assert Affinity(slack=4).choose(keys("1"), {"a": 0, "b": 0}, earlier="b") == "b"
    assert Affinity(slack=4).choose(keys("1"), {"a": 0}, earlier="b") == "a"


def test_a_new_prompt_goes_to_the_same_replica_from_every_gateway() -> None:
    for number in range(20):
        new = keys(str(number))
        assert Affinity(slack=4).choose(new, IDLE) == Affinity(slack=4).choose(new, dict(reversed(IDLE.items())))
    assert len({Affinity(slack=4).choose(keys(str(number)), IDLE) for number in range(40)}) == 4


def test_a_new_prompt_goes_to_the_second_choice_if_the_first_is_out_of_balance_and_then_anywhere() -> None:
    affinity = Affinity(slack=8)
    first, second, *_ = ranked(b"1", REPLICAS)
    assert affinity.choose(keys("1"), {**IDLE, first: 8}) == first
    assert affinity.choose(keys("1"), {**IDLE, first: 9}) == second
    assert affinity.choose(keys("1"), {**IDLE, first: 9, second: 9}) is None
    assert affinity.choose(keys("1"), {"a": 7}) == "a"


def test_requests_without_a_key_have_no_choice() -> None:
    assert Affinity(slack=4).choose((), IDLE) is None


def test_keys_that_were_not_seen_for_the_longest_time_are_forgotten() -> None:
    affinity = Affinity(slack=4)
    first = ranked(b"1", REPLICAS)[0]
    other = next(replica for replica in REPLICAS if replica != first)
    affinity.learn(keys("1", *(f"before {number}" for number in range(99_999))), other)
    affinity.learn(keys("1"), other)
    affinity.learn((f"after {number}".encode() for number in range(99_999)), other)
    assert affinity.choose(keys("1"), IDLE) == other
    affinity.learn(keys("2"), other)
    assert affinity.choose(keys("1"), IDLE) == first


def test_at_most_four_replicas_are_remembered_for_a_beginning() -> None:
    affinity = Affinity(slack=100)
    many = [str(number) for number in range(6)]
    for replica in many:
        affinity.learn(keys("1"), replica)
    chosen = affinity.choose(keys("1"), dict(zip(many, range(6), strict=True)))
    assert chosen == "2"


def test_a_replica_is_remembered_once_for_a_beginning() -> None:
    affinity = Affinity(slack=100)
    for replica in ("a", "b", "b", "b", "b"):
        affinity.learn(keys("1"), replica)
    assert affinity.choose(keys("1"), {**IDLE, "b": 1}) == "a"


def test_a_session_keeps_its_replica_when_others_come_and_go() -> None:
    before = {number: ranked(str(number).encode(), REPLICAS)[0] for number in range(200)}
    without = {number: ranked(str(number).encode(), REPLICAS[:3])[0] for number in range(200)}
    assert all(without[number] == replica for number, replica in before.items() if replica != "d")
    assert min(Counter(before.values()).values()) > 25
    assert ranked(b"1", REPLICAS) == ["b", "c", "a", "d"], "routers of two releases agree while a cluster is updated"
