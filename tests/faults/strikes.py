"""What several kinds do to a server."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tests.support.server import Server
from tests.support.waiting import wait_until


@contextlib.contextmanager
def engine_replaced(server: Server) -> Iterator[None]:
    """The block ends the engine process; afterwards there is another one."""
    restarts = server.metric("executor_restarts_total")
    yield
    wait_until(lambda: server.metric("executor_restarts_total") > restarts, what="a new engine process")
