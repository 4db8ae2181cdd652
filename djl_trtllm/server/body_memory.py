"""How much memory request bodies have, all together."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from djl_trtllm.errors import OverloadedError


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

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """A body of `size` bytes is in memory during the block. Raises OverloadedError."""
        if not self.take(0, size):
            raise self.refusal()
        try:
            yield
        finally:
            self.release(size)

    def refusal(self) -> OverloadedError:
        """Why a body gets no memory."""
        return OverloadedError(
            f"the bodies of all requests that are being read have {self.used} of max_body_memory={self.limit} "
            "bytes, which leaves too little for this one",
            queue_depth=self.used,
            capacity=self.limit,
            retry_after=1,
        )
