"""What /ping says all along."""

from __future__ import annotations

import time

import httpx

from tests.support.background import InBackground
from tests.support.server import Server
from tests.support.waiting import wait_until


class Pinging(InBackground):
    """Asks for /ping during the block, and keeps each status with the time of its arrival."""

    def __init__(self, server: Server) -> None:
        self.seen: list[tuple[float, int]] = []
        self._server = server
        super().__init__()

    @property
    def statuses(self) -> list[int]:
        """In their order."""
        return [status for _, status in self.seen]

    def recovered(self) -> float:
        """When a 200 first came after a 503; waits for it."""
        wait_until(lambda: 503 in self.statuses and 200 in self._since_503(), what="recovery")
        later = self.seen[self.statuses.index(503) :]
        return next(at for at, status in later if status == 200)

    def _since_503(self) -> list[int]:
        statuses = self.statuses
        return statuses[statuses.index(503) :]

    def _run(self) -> None:
        with httpx.Client(base_url=self._server.url, timeout=300, trust_env=False) as client:
            while not self._end.is_set():
                status = client.get("/ping").status_code
                self.seen.append((time.monotonic(), status))
                time.sleep(0.01)
