"""A server that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack

import httpx

from tests.support.server import Server


class KeptServer:
    """Started when it is first wanted. One that a test has left broken is replaced, so that only that test fails."""

    def __init__(self, start: Callable[[], AbstractContextManager[Server]]) -> None:
        self._start = start
        self._stack = ExitStack()
        self._server: Server | None = None

    def get(self) -> Server:
        """A server that answers."""
        if self._server is not None and not _answers(self._server):
            if self._server.process.poll() is None:
                self._server.process.kill()
                self._server.process.wait()
            self.close()
        if self._server is None:
            self._server = self._stack.enter_context(self._start())
        return self._server

    def close(self) -> None:
        self._server = None
        self._stack.close()


def _answers(server: Server) -> bool:
    """By the strongest check that there is: it generates."""
    if server.process.poll() is not None:
        return False
    try:
        return server.ping() == 200 and server.generate(2).status_code == 200
    except httpx.HTTPError:
        return False
