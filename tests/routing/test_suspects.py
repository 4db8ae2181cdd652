"""Which request ends replicas."""

from __future__ import annotations

import pytest

from djl_trtllm.routing.fleet import Suspects


class Fleet:
    """Replicas and their suspects, on a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.suspects = Suspects(lambda: self.now)

    def ends(self, digest: str, *replicas: str, after: float = 0.0) -> None:
        """Each of the replicas dies of a request."""
        for replica in replicas:
            self.suspects.sent(digest, replica)
            self.now += after
            self.suspects.died(replica)


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_request_ends_two_replicas_and_is_refused_for_ten_minutes(fleet: Fleet) -> None:
    fleet.ends("bad", "a")
    assert fleet.suspects.refused_for("bad") == 0
    fleet.ends("bad", "b")
    assert fleet.suspects.refused_for("bad") == 600
    fleet.now += 599
    assert fleet.suspects.refused_for("bad") == 1
    fleet.now += 1
    assert fleet.suspects.refused_for("bad") == 0
    fleet.ends("bad", "c")
    assert fleet.suspects.refused_for("bad") == 0, "it begins anew"


def test_many_replicas_that_die_together_are_one_death_of_each_request(fleet: Fleet) -> None:
    for number in range(8):
        fleet.suspects.sent(f"good {number}", f"replica {number}")
    for number in range(8):
        fleet.suspects.died(f"replica {number}")
    assert not any(fleet.suspects.refused_for(f"good {number}") for number in range(8))


def test_what_was_sent_long_before_is_no_suspect(fleet: Fleet) -> None:
    fleet.ends("slow", "a", "b", after=10.5)
    assert not fleet.suspects.refused_for("slow")
    fleet.ends("slow", "c", "d", after=10)
    assert fleet.suspects.refused_for("slow")


def test_a_replica_that_ray_removes_is_no_death_and_one_dies_once(fleet: Fleet) -> None:
    fleet.ends("bad", "a")
    fleet.suspects.died("a")
    fleet.suspects.sent("bad", "b")
    fleet.suspects.keep(["a"])
    fleet.suspects.died("b")
    assert not fleet.suspects.refused_for("bad")
    fleet.suspects.sent("bad", "b")
    fleet.suspects.keep(["a", "b"])
    fleet.suspects.died("b")
    assert fleet.suspects.refused_for("bad")


def test_no_more_than_ten_thousand_are_remembered(fleet: Fleet) -> None:
    fleet.ends("bad", "a", "b")
    for number in range(10_001):
        fleet.suspects.sent(str(number), "c")
    assert fleet.suspects.died("c") == {str(number) for number in range(1, 10_001)}
    assert not fleet.suspects.refused_for("bad")
