from __future__ import annotations

import asyncio
from collections import Counter
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from djl_trtllm.cluster.affinity import ranked
from djl_trtllm.cluster.forwarding import ForwardedRequest
from djl_trtllm.cluster.known_replicas import begin_waiting, is_waiting

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from djl_trtllm.cluster.request_router import PrefixRouter

DEPLOYMENT = DeploymentID("model", "app")


class Routed(PrefixRouter):
    """A router of replicas that do not exist, with what it counted."""

    def __init__(self, replicas: int) -> None:
        super().__init__(
            deployment_id=DEPLOYMENT, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
        )
        self.replicas = [SimpleNamespace(replica_id=ReplicaID(f"r{n}", DEPLOYMENT)) for n in range(replicas)]
        self.initialize_state(slack=2, deployment="model")
        self.by: Counter[str] = Counter()
        self._routed = SimpleNamespace(inc=lambda tags: self.by.update([tags["by"]]))

    def ranks(self, pending: PendingRequest | None) -> list[list[str]]:
        chosen = asyncio.run(self.choose_replicas(list(self.replicas), pending))
        return [[replica.replica_id.unique_id for replica in rank] for rank in chosen]

    def send(self, number: str, *keys: str) -> str:
        """Route a request, as Ray does; the replica that it went to."""
        request = pending(number, *keys)
        first = self.ranks(request)[0][0]
        self.on_request_routed(request, ReplicaID(first, DEPLOYMENT), None)
        return first


def pending(number: str, *keys: str, session: str = "", replica: str = "") -> PendingRequest:
    made = ForwardedRequest({}, b"", session, tuple(key.encode() for key in keys), replica)
    metadata = RequestMetadata(request_id=number, internal_request_id=number)
    return PendingRequest([made], {}, metadata, future=Future())


@pytest.fixture
def router() -> Routed:
    return Routed(4)


def test_a_prompt_goes_where_its_beginning_went(router: Routed) -> None:
    first = router.send("1", "a")
    router.on_request_completed(ReplicaID(first, DEPLOYMENT), "1")
    assert router.ranks(pending("2", "a", "b"))[0] == [first]
    assert router.by == {"prefix": 2}


def test_a_prompt_goes_where_its_beginning_went_although_that_was_no_preferred_replica(
    router: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    preferred = [ReplicaID(name, DEPLOYMENT) for name in ranked(b"a", ["r0", "r1", "r2", "r3"])[:2]]
    busy = [(replica, f"{replica.unique_id}-{number}") for replica in preferred for number in range(3)]
    for replica, number in busy:
        router.on_request_routed(pending(number), replica, None)
    first = {replica.unique_id for replica in preferred}
    monkeypatch.setattr("random.sample", lambda replicas, count: sorted(set(replicas) - first)[:count])
    other = router.send("1", "a")
    for replica, number in (*busy, (ReplicaID(other, DEPLOYMENT), "1")):
        router.on_request_completed(replica, number)
    assert other not in first
    assert router.ranks(pending("2", "a"))[0] == [other]


def test_all_others_are_asked_where_the_preferred_replica_has_no_room(router: Routed) -> None:
    preferred, others = router.ranks(pending("1", "a"))
    assert sorted(preferred + others) == ["r0", "r1", "r2", "r3"]


def test_a_replica_that_is_out_of_balance_is_passed_over_until_its_requests_have_ended(router: Routed) -> None:
    first = router.send("1", "a")
    assert [router.send(number, "a") for number in "23"] == [first, first]
    assert router.send("4", "a") != first
    for number in "123":
        router.on_request_completed(ReplicaID(first, DEPLOYMENT), number)
    assert router.ranks(pending("5", "a"))[0] == [first]


def test_requests_of_other_gateways_count(router: Routed) -> None:
    first = router.send("1", "a")
    router.replica_queue_len_cache.update(ReplicaID(first, DEPLOYMENT), 3)
    assert router.ranks(pending("2", "a"))[0] != [first]


def test_what_was_counted_ends_with_its_request(router: Routed) -> None:
    first = ReplicaID(router.send("1", "a"), DEPLOYMENT)
    router.on_request_completed(first, "of a request that was rejected")
    router.on_request_completed(first, "1")
    router.on_request_completed(first, "1")
    assert (router._sent, router._replica_of) == ({}, {})


def test_a_request_counts_as_soon_as_its_replica_is_chosen(router: Routed) -> None:
    burst = [router.ranks(pending(str(number), "a"))[0][0] for number in range(12)]
    assert max(Counter(burst).values()) <= 5


def test_a_request_that_is_given_up_before_it_was_sent_does_not_count(router: Routed) -> None:
    request = pending("1", "a")
    router.ranks(request)
    request.future.cancel()
    assert router._sent == {}
    sent = pending("2", "a")
    (chosen,) = router.ranks(sent)[0]
    sent.future.set_result(None)
    assert router._sent == {chosen: 1}


def test_a_request_counts_for_the_replica_that_has_accepted_it(router: Routed) -> None:
    request = pending("1", "a")
    (chosen,), others = router.ranks(request)
    router.on_request_routed(request, ReplicaID(others[0], DEPLOYMENT), None)
    router.on_request_completed(ReplicaID(chosen, DEPLOYMENT), "1")
    assert router._sent == {others[0]: 1}
    router.on_request_completed(ReplicaID(others[0], DEPLOYMENT), "1")
    assert router._sent == {}


def test_a_session_wins_over_the_prefix_and_over_the_load(router: Routed) -> None:
    mine = ranked(b"mine", ["r0", "r1", "r2", "r3"])[0]
    for number in range(9):
        router.on_request_routed(pending(str(number)), ReplicaID(mine, DEPLOYMENT), None)
    for number in range(9):
        router.on_request_routed(pending(str(number), "a"), ReplicaID("r0" if mine != "r0" else "r1", DEPLOYMENT), None)
    assert router.ranks(pending("x", "a", session="mine"))[0] == [mine]
    assert router.by == {"session": 1}


def test_a_request_for_a_replica_goes_there_and_to_no_other(router: Routed) -> None:
    for number in range(9):
        router.send(str(number), "a")
    for name in ("r0", "r3"):
        request = pending(f"to {name}", "a", session="mine", replica=name)
        assert router.ranks(request) == [[name]]
        router.ranks(request)
        assert request.routing_context.should_backoff
    assert len(router.ranks(pending("gone", "a", replica="r4"))[1]) == 3
    assert sum(router.by.values()) == 10


def test_a_request_without_a_key_goes_to_the_less_loaded_of_two(
    router: Routed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.sample", lambda replicas, count: replicas[-count:])
    assert [router.ranks(pending(str(number)))[0] for number in range(4)] == [["r2"], ["r3"], ["r2"], ["r3"]]
    assert router.by == {"load": 4}
    assert Routed(1).ranks(pending("1")) == [["r0"], []]


def test_a_call_of_no_gateway_has_all_replicas(router: Routed) -> None:
    call = PendingRequest(["no request"], {}, RequestMetadata("1", "1"), future=Future())
    for given in (call, None):
        assert router.ranks(given) == [["r0", "r1", "r2", "r3"]]
    assert not router.by


def test_of_many_requests_at_once_each_gets_a_replica() -> None:
    async def probed(deadline_s: float) -> int:
        await asyncio.sleep(0)
        return 0

    async def scenario() -> None:
        router = Routed(2)
        for replica in router.replicas:
            replica.max_ongoing_requests, replica.get_queue_len = 100, probed
        router.update_replicas(router.replicas)
        requests = [pending(str(number), "a" if number % 2 else "") for number in range(12)]
        for request in requests:
            request.future = asyncio.get_running_loop().create_future()
        chosen = await asyncio.gather(*map(router._choose_replica_for_request, requests))
        assert {replica.replica_id.unique_id for replica in chosen} == {"r0", "r1"}
        assert not router._pending_requests_to_route

    asyncio.run(scenario())


def test_a_request_that_ray_has_lost_is_routed_again(router: Routed, monkeypatch: pytest.MonkeyPatch) -> None:
    done, lost, new = (pending(number) for number in "123")
    done.future.set_result(None)
    router._pending_requests_to_fulfill.extend([done, lost, new])
    router._pending_requests_to_route.append(new)
    # Ray may have put copies of the methods in their place, with globals of their own.
    its_globals = PrefixRouter._get_next_pending_request_to_route.__globals__
    monkeypatch.setitem(its_globals, "_LOSES_REQUESTS", True)
    assert router._get_next_pending_request_to_route() is new
    assert router._get_next_pending_request_to_route() is lost
    monkeypatch.setitem(its_globals, "_LOSES_REQUESTS", False)
    assert router._get_next_pending_request_to_route() is None


def test_a_full_cluster_is_asked_again_after_a_pause(router: Routed) -> None:
    request = pending("1", "a")
    router.ranks(request)
    assert request.routing_context.should_backoff


def test_a_request_that_a_replica_has_accepted_waits_no_longer() -> None:
    router, request = Routed(1), pending("1", "a")
    begin_waiting(request.args[0])
    router.ranks(request)
    assert is_waiting(request.args[0])
    router.on_request_routed(request, ReplicaID("r0", DEPLOYMENT), None)
    assert not is_waiting(request.args[0])
