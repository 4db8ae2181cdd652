"""How much memory request bodies have, all together."""

from __future__ import annotations

import sys


class BodyMemory:
    """Counts the bytes of request bodies that are in memory.

    A body may have as much as is still free after it (dynamic thresholds, as switches share buffers: Choudhury and
    Hahne, 1998). Large bodies leave room for small ones, however many they are, and nothing is reserved for bodies that
    do not come.
    """

    def __init__(self, limit: int = sys.maxsize) -> None:
        self.limit = limit
        self.used = 0

    def take(self, held: int, more: int) -> bool:
        """Take `more` bytes for a body that holds `held` of them; False if it would have too many."""
        if held + more > self.limit - self.used - more:
            return False
        self.used += more
        return True

    def release(self, size: int) -> None:
        self.used -= size
