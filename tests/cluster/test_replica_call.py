"""A call waits for a replica for a bounded time, and for the answer of one that has it as long as that takes."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed (the extra `ray`)", exc_type=ImportError)

from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from djl_trtllm.cluster import replica_call
from djl_trtllm.cluster.forwarding import ForwardedRequest, IncompleteResponseError
from djl_trtllm.cluster.known_replicas import end_waiting, is_waiting
from djl_trtllm.cluster.replica_call import ReplicaCall
from djl_trtllm.errors import NotReadyError
from tests.cluster.deployments import Deployment, replica

REQUEST = ForwardedRequest({"type": "http", "path": "/invocations", "method": "POST", "headers": []}, b"{}")


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that Ray names."""
    monkeypatch.setattr(replica_call, "_LOOK_SECONDS", 0.002)
    monkeypatch.setattr(replica_call, "_NO_REPLICA_SECONDS", 0.02)
    found: list[str] = []
    monkeypatch.setattr(replica_call, "replicas_of", lambda model: found if model == "a" else ["another"])
    return found


def played(scenario: Callable[[Deployment, Any], Awaitable[None]], name: str = "a") -> None:
    """With a deployment, and its method `remote` as the handle's. Nothing that goes wrong may be left unread."""
    unread: list[Any] = []

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context["message"]))
        deployment = Deployment(replica(name))
        await scenario(deployment, deployment.options(stream=True).answer)
        for _ in range(5):
            await asyncio.sleep(0)
            gc.collect()

    asyncio.run(body())
    gc.collect()
    assert unread == []


def test_without_a_replica_it_is_given_up(replicas: list[str]) -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        deployment.has_replica = False
        call = ReplicaCall("a", handle, REQUEST)
        with pytest.raises(NotReadyError, match="model a has no replica") as refused:
            await call.head()
        assert refused.value.retry_after == 10
        assert is_waiting(deployment.requests[0])
        call.cancel()
        assert not is_waiting(deployment.requests[0])

    played(scenario, "silent")


def test_a_replica_that_has_the_request_may_answer_after_it_was_taken_from_the_list(replicas: list[str]) -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        call = ReplicaCall("a", handle, REQUEST)
        head = asyncio.ensure_future(call.head())
        await asyncio.wait({head}, timeout=0.1)
        assert not head.done()
        call.cancel()
        with pytest.raises(RuntimeError, match="this call was cancelled"):
            await head

    played(scenario, "silent")


def test_it_waits_while_there_are_replicas_and_from_their_loss_on(replicas: list[str]) -> None:
    replicas.append("r1")

    async def scenario(deployment: Deployment, handle: Any) -> None:
        deployment.has_replica = False
        call = ReplicaCall("a", handle, REQUEST)
        head = asyncio.ensure_future(call.head())
        await asyncio.wait({head}, timeout=0.1)
        assert not head.done()
        clock = asyncio.get_running_loop().time
        replicas.clear()
        lost = clock()
        with pytest.raises(NotReadyError):
            await head
        assert clock() - lost >= 0.015
        call.cancel()

    played(scenario, "silent")


def test_what_waits_gets_the_replica_that_comes(replicas: list[str]) -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        deployment.has_replica = False
        call = ReplicaCall("a", handle, REQUEST)
        end_waiting(deployment.requests[0])
        head = await call.head()
        assert (head.status, head.whole) == (200, True)
        call.cancel()

    played(scenario)


@pytest.mark.parametrize("name", ["a", "parts"])
def test_a_response_in_parts_can_be_had_in_one(name: str) -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        call = ReplicaCall("a", handle, REQUEST)
        whole = await call.whole()
        assert (whole.status, whole.whole, json.loads(whole.body)["name"]) == (200, True, name)
        call.cancel()

    played(scenario, name)


def test_a_response_without_a_head_is_incomplete() -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        deployment.failures = [(0, StopAsyncIteration())]
        call = ReplicaCall("a", handle, REQUEST)
        with pytest.raises(IncompleteResponseError, match="the response has no beginning"):
            await call.whole()
        call.cancel()

    played(scenario)


def test_a_model_that_ray_cannot_load_is_not_ready() -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        deployment.failures = [(0, DeploymentUnavailableError(DeploymentID("a", "app")))]
        call = ReplicaCall("a", handle, REQUEST)
        with pytest.raises(NotReadyError, match="model a cannot be loaded"):
            await call.head()
        call.cancel()

    played(scenario)


def test_a_call_that_cannot_be_made_waits_for_nothing() -> None:
    made: list[ForwardedRequest] = []

    def remote(request: ForwardedRequest) -> None:
        made.append(request)
        raise RuntimeError("the controller is gone")

    with pytest.raises(RuntimeError, match="the controller is gone"):
        ReplicaCall("a", SimpleNamespace(remote=remote), REQUEST)
    assert not is_waiting(made[0])


def test_a_handler_that_ends_leaves_no_error_unread(replicas: list[str]) -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        call = ReplicaCall("a", handle, REQUEST)
        head = asyncio.ensure_future(call.head())
        await asyncio.sleep(0.01)
        head.cancel()
        call.cancel()
        with pytest.raises((asyncio.CancelledError, RuntimeError)):
            await head

    played(scenario, "silent")


def test_calls_with_the_same_request_wait_for_replicas_of_their_own(replicas: list[str]) -> None:
    async def scenario(deployment: Deployment, handle: Any) -> None:
        deployment.has_replica = False
        calls = [ReplicaCall("a", handle, REQUEST) for _ in range(2)]
        first, second = deployment.requests
        end_waiting(first)
        assert (is_waiting(first), is_waiting(second)) == (False, True)
        for call in calls:
            call.cancel()

    played(scenario)
