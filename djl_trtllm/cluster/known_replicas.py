"""What this process, a gateway, knows of Ray's routing: the replicas, and which requests have one.

Ray Serve gives gateways a copy of their router's class, whose globals are copies too. Those of this module are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from ray.serve.request_router import RequestRouter

    from djl_trtllm.cluster.forwarding import ForwardedRequest

_WAITING: set[int] = set()
"""Identities of the requests that no replica has accepted: they hold dictionaries and have no hash. The call and Ray
keep each request alive as long as it is here."""
_ROUTERS: WeakValueDictionary[str, RequestRouter] = WeakValueDictionary()


def knows(router: RequestRouter, deployment: str) -> None:
    """The router knows the replicas of a deployment from now on."""
    _ROUTERS[deployment] = router


def replicas_of(deployment: str) -> list[str]:
    """The names of a deployment's replicas; none before the first request for them."""
    router = _ROUTERS.get(deployment)
    return [] if router is None else [replica.unique_id for replica in router.curr_replicas]


def begin_waiting(request: ForwardedRequest) -> None:
    """The request has no replica yet."""
    _WAITING.add(id(request))


def end_waiting(request: ForwardedRequest) -> None:
    """A replica has accepted the request, or its call has ended."""
    _WAITING.discard(id(request))


def is_waiting(request: ForwardedRequest) -> bool:
    """Whether the request has no replica yet."""
    return id(request) in _WAITING
