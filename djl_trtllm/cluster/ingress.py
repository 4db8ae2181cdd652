"""Whether clients reach a replica directly: through HAProxy, with the server's event loop as the replica's own."""

from __future__ import annotations

from collections.abc import Mapping

HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
SEPARATE_THREAD = "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD"

DIRECT = {HAPROXY: "1", SEPARATE_THREAD: "0"}
"""The environment of all nodes with which they do."""

NODES = {
    **DIRECT,
    # HAProxy asks another replica if one dies before it has answered.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    # It starts anew at each change of the replicas; the one before keeps its streams for this number of seconds.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # The default of Ray 2.60. For that of 2.55, 20000, most machines allow too few open files, and it does not start.
    "RAY_SERVE_HAPROXY_MAXCONN": "4096",
}
"""The environment that all nodes should have."""

BEHIND_GATEWAYS = {
    SEPARATE_THREAD: "0",
    # Of gRPC, in bytes, as much as there can be: the gateway has bounded the body.
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),
}
"""The environment of replicas behind gateways, which their deployment sets."""

GATEWAYS = {
    **BEHIND_GATEWAYS,
    # Calls of replicas by gRPC in the gateway's event loop: responses have flow control, and are no objects of Ray.
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
"""The environment of a gateway, which its deployment sets."""


def problem_of_ingress(environ: Mapping[str, str]) -> str | None:
    """What is lost between a replica with this environment and its clients; None if it is nothing."""
    lost = (
        "streams of clients that do not read are not held back, stream_write_timeout has no effect, and tokens pass "
        "another process"
    )
    wrong = [f"{name}={value}" for name, value in DIRECT.items() if environ.get(name) != value]
    if not wrong:
        return None
    return (
        f"Ray Serve's own proxy is between this replica and its clients: {lost}. Set {' and '.join(wrong)} on all nodes"
    )
