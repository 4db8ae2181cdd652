"""The replicas that this process, a gateway, knows.

Ray Serve gives gateways a copy of their router's class, whose globals are copies too. Those of this module are not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from ray.serve.request_router import RequestRouter

_ROUTERS: WeakValueDictionary[str, RequestRouter] = WeakValueDictionary()


def knows(router: RequestRouter, deployment: str) -> None:
    """The router knows the replicas of a deployment from now on."""
    _ROUTERS[deployment] = router


def replicas_of(deployment: str) -> list[str]:
    """The names of a deployment's replicas; none before the first request for them."""
    router = _ROUTERS.get(deployment)
    return [] if router is None else [replica.unique_id for replica in router.curr_replicas]
