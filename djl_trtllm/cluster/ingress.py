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
}
"""The environment that all nodes should have."""


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
