"""Names of Ray that are private, or that only some versions have; a test checks them in the installed one.

Ray has a router of requests before its HAProxy from 2.56 on, made for its own LLM servers. From 2.58 on the router's
answer may set headers, which no client can set.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray import serve

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
SEPARATE_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"
DIRECT = {HAPROXY: "1", SEPARATE_THREAD: "0"}
"""The environment of all nodes with which clients reach replicas directly: through HAProxy, with the server's event
loop as the replica's own."""
NODES = {
    **DIRECT,
    # HAProxy asks another replica if one dies before it has answered, and no third one: the request may be the reason.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_HAPROXY_RETRIES": "1",
    # The router gets the beginning of each body. HAProxy repeats a request whose body is in its buffer.
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "262144",
    # It starts anew at each change of the replicas; the one before keeps its streams for this number of seconds.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # The one before ends connections that wait for their next request within these seconds: it would send that one by
    # what it knew before the change, to routers and replicas that are gone.
    "RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S": "5",
    # A token costs one thread two thirds of what it costs four, which wake each other; one carries 70,000 per second.
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    # An HAProxy that has ended is replaced after three checks, with Ray's 10 seconds after half a minute.
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
    # Ray's 15 puts replicas, their engines and HAProxy behind everything else that the machine has to do.
    "RAY_worker_niceness": "0",
    # The default of Ray 2.60. For that of 2.55, 20000, most machines allow too few open files, and it does not start.
    "RAY_SERVE_HAPROXY_MAXCONN": "4096",
}
"""The environment that all nodes should have."""
OF_ROUTERS = {SEPARATE_THREAD: "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""The environment of a router: all it does is in one event loop."""

ROUTER = "-router"
"""The end of the name of a router's deployment, after the name of the deployment that it routes to."""
UNDISPATCHED = {"_reserve": False}
"""Keywords of `DeploymentHandle.choose_replica` for a request that HAProxy sends, and the handle does not."""
AT_ONCE = {"_blocking": False}
"""Keywords of `serve.delete`, which does not wait for the end of the application with them."""
HEADERS = "x-serve-router-"
"""The beginning of the names of headers that a router may set; HAProxy removes them from what clients send."""
CHOSEN, DIGEST, REFUSED = (f"{HEADERS}{name}" for name in ("chosen", "digest", "refused"))
"""Headers of ours. `CHOSEN`: the replica that the router has chosen (if another one gets the request, it is HAProxy's
second try). `DIGEST`: the digest of the request. `REFUSED`: the seconds for which a request is refused that has ended
replicas."""


def has_routers() -> bool:
    """Whether HAProxy can ask a router of ours here."""
    from ray.serve import Application
    from ray.serve._private import constants

    prefix = getattr(constants, "SERVE_INGRESS_ROUTER_HEADER_PREFIX", None)
    return os.environ.get(HAPROXY) == "1" and hasattr(Application, "_with_ingress_request_router") and prefix == HEADERS


def with_router(application: serve.Application, router: serve.Application) -> serve.Application:
    """Let HAProxy ask the router for each POST to the application."""
    return application._with_ingress_request_router(router)


def address(replica: Any) -> tuple[str, int] | None:
    """The address at which a replica (`ray.serve.request_router.RunningReplica`) listens.

    On this node it may listen at 127.0.0.1 only, and Ray names the node.
    """
    import ray

    found: tuple[str, int] | None = replica.backend_http_endpoint
    if found is not None and found[0] == ray.util.get_node_ip_address():
        return "127.0.0.1", found[1]
    return found


def write_part(receive: Any) -> Callable[[bytes], bool] | None:
    """`ServerConnection.write_part` of uvicorn's connection, below Ray's proxy of `receive`; None if it is elsewhere.

    Without it each token passes coroutines of ours, of Ray (two) and of uvicorn, a third of what it costs a replica.
    """
    cycle: Any = getattr(getattr(receive, "_receive", None), "__self__", None)
    of_uvicorn = ("chunked_encoding", "response_complete", "disconnected", "flow", "transport")
    if os.environ.get(SEPARATE_THREAD) != "0" or not all(hasattr(cycle, name) for name in of_uvicorn):
        return None

    def write(part: bytes) -> bool:
        if not cycle.chunked_encoding or cycle.response_complete or cycle.disconnected or cycle.flow.write_paused:
            return False
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    return write
