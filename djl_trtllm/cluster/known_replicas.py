"""What this process, a gateway, knows of Ray's routing: the replicas, and which requests have one.

Ray Serve gives gateways a copy of their router's class, whose globals are copies too. Those of this module are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from ray.serve.request_router import RequestRouter

    from djl_trtllm.cluster.forwarding import ForwardedRequest

_UNROUTED: set[int] = set()
"""Identities of requests that no replica has accepted."""
_ROUTERS: WeakValueDictionary[str, RequestRouter] = WeakValueDictionary()


def knows(router: RequestRouter, deployment: str) -> None:
    """The router knows the replicas of a deployment from now on."""
    _ROUTERS[deployment] = router


def replicas_of(deployment: str) -> list[str]:
    """The names of a deployment's replicas; none before the first request for them."""
    router = _ROUTERS.get(deployment)
    return [] if router is None else [replica.unique_id for replica in router.curr_replicas]


def waits_for_replica(request: ForwardedRequest) -> None:
    """The request is to get a replica. It waits until `has_replica`."""
    _UNROUTED.add(id(request))


def has_replica(request: ForwardedRequest) -> None:
    """A replica has accepted the request, or it needs none any more."""
    _UNROUTED.discard(id(request))


def is_waiting(request: ForwardedRequest) -> bool:
    return id(request) in _UNROUTED
