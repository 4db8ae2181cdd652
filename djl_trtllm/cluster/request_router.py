"""Ray Serve's extension that chooses the replica of a request, for requests of a gateway.

Ray has such a router, `ray.serve.llm.request_router.PrefixCacheAffinityRouter`. It takes objects with `messages` or
`prompt` only, waits in the event loop for an actor with a tree of all prompts, which grows without end by default, and
comes with a package that imports engines. Its session router, `ConsistentHashRouter`, is not in Ray 2.55.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial

from ray.serve import metrics
from ray.serve.request_router import LocalityMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from djl_trtllm.cluster.affinity import Affinity, ranked
from djl_trtllm.cluster.forwarding import ForwardedRequest
from djl_trtllm.cluster.known_replicas import end_waiting, knows

_CHOICES = 2
_LOSES_REQUESTS = not hasattr(RequestRouter, "_cancel_routing_task_for_pending_request")
"""Ray before 2.60: a task that routes requests may end with one that has no replica yet, and nobody takes that up."""


class PrefixRouter(LocalityMixin, RequestRouter):  # type: ignore[misc]  # Any to mypy, which does not read Ray
    """Sends a session to its replica, and a prompt to one that had its beginning, while that is not out of balance.

    Others go to the less loaded of two random replicas, as with Ray's default.
    """

    def initialize_state(self, slack: int, deployment: str) -> None:
        """`slack` is that of `Affinity`. Ray calls it with `request_router_kwargs`."""
        knows(self, deployment)
        self._affinity = Affinity(slack)
        self._replica_of: dict[str, str] = {}
        self._sent: Counter[str] = Counter()
        self._routed = metrics.Counter(
            "djl_trtllm_routed_requests",
            description="Requests of a gateway, by what chose their replica: session, prefix or load.",
            tag_keys=("by",),
        )

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The preferred replica, then all others: the next list is asked where nobody of one has room."""
        # It notes in the request that a full cluster is asked again after a pause.
        self.apply_locality_routing(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _forwarded(pending_request)
        if pending_request is None or request is None or not replicas:
            return [candidate_replicas]
        if request.replica in replicas:
            return [[replicas[request.replica]]]
        chosen, by = self._choose(request, replicas)
        self._routed.inc(tags={"by": by})
        self._count(pending_request, chosen)
        return [[replicas.pop(chosen)], list(replicas.values())]

    def _get_next_pending_request_to_route(self) -> PendingRequest | None:
        """What a task of Ray's is to route next: as a last resort, what another one has taken.

        Where such a request is lost, another task counts it as one that waits, and turns for it without end in the
        gateway's event loop.
        """
        request = super()._get_next_pending_request_to_route()
        if request is None and _LOSES_REQUESTS:
            request = next((each for each in self._pending_requests_to_fulfill if not each.future.done()), None)
        return request

    def _choose(self, request: ForwardedRequest, replicas: dict[str, RunningReplica]) -> tuple[str, str]:
        if request.session:
            return ranked(request.session.encode(), replicas)[0], "session"
        loads = {name: self._load(replica.replica_id) for name, replica in replicas.items()}
        if (chosen := self._affinity.choose(request.keys, loads)) is not None:
            return chosen, "prefix"
        return min(random.sample(list(loads), min(_CHOICES, len(loads))), key=loads.__getitem__), "load"

    def _load(self, replica: ReplicaID) -> int:
        """Its running requests: those of this gateway, or, if that is known, of all."""
        return max(self._sent[replica.unique_id], self.replica_queue_len_cache.get(replica) or 0)

    def _count(self, pending: PendingRequest, replica: str) -> None:
        """Count a request for its replica, as soon as it is chosen: those of a burst are routed before any is sent."""
        request_id = pending.metadata.internal_request_id
        before = self._replica_of.get(request_id)
        if before == replica:
            return
        if before is None:
            pending.future.add_done_callback(partial(self._given_up, request_id))
        else:
            self._forget(request_id)
        self._replica_of[request_id] = replica
        self._sent[replica] += 1
        if (request := _forwarded(pending)) is not None:
            self._affinity.learn(request.keys, replica)

    def _given_up(self, request_id: str, chosen: asyncio.Future[object]) -> None:
        """Forget a request that was cancelled before it was sent."""
        if chosen.cancelled():
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        replica = self._replica_of.pop(request_id, None)
        if replica is not None:
            self._sent[replica] -= 1
            if not self._sent[replica]:
                del self._sent[replica]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        """Ray calls it when a replica has accepted a request."""
        self._count(pending_request, replica_id.unique_id)
        if (request := _forwarded(pending_request)) is not None:
            end_waiting(request)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Ray calls it when a request has ended, or was rejected by the replica."""
        if self._replica_of.get(internal_request_id) == replica_id.unique_id:
            self._forget(internal_request_id)


def _forwarded(pending: PendingRequest | None) -> ForwardedRequest | None:
    """The request of a gateway; None for a call that is none."""
    first = pending.args[0] if pending is not None and pending.args else None
    return first if isinstance(first, ForwardedRequest) else None
