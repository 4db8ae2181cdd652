"""Watches the resident memory of an engine process: says when it grows, and when it has reached its limit."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)

_UNIT = 10**9
_GROWN = 1.25
_LEAST_GROWTH = 250 * 10**6
"""Bytes. Growth is logged when it is a quarter of what was logged last, and at least this."""

_PAUSE_SECONDS = 60.0
"""Between two recyclings: a limit just above what a loaded engine takes must not become a loop of loading."""


class MemoryWatch:
    """`limit` in GB, None without one. `resident` is what was measured last, in bytes."""

    def __init__(self, name: str, limit: float | None) -> None:
        self.resident = 0
        self._name = name
        self._limit = limit
        self._pid = 0
        self._at_start = 0
        self._told = 0
        self._recycled_at: float | None = None

    def begin(self, pid: int, resident: int) -> None:
        """Another engine process, which takes this much once it is loaded."""
        self._pid = pid
        self.resident = self._at_start = self._told = resident
        if self._reached(resident):
            logger.warning(
                "model %s: option.executor_memory_limit=%g has no effect: the engine process takes %s as soon as it is "
                "loaded; set a limit above that",
                self._name,
                self._limit,
                _shown(resident),
            )

    def look(self, resident: int) -> str | None:
        """Take a measurement; the reason to recycle the process, if it is one."""
        if not resident:
            return None  # it has just ended
        hopeless = self._reached(self._at_start)
        self.resident = resident
        if resident >= self._told * _GROWN and resident - self._told >= _LEAST_GROWTH:
            logger.warning(
                "model %s: the engine process (pid %d) has grown to %s, from %s after loading; a KV cache grows until "
                "it was full once, and option.executor_memory_limit recycles a process that grows on",
                self._name,
                self._pid,
                _shown(resident),
                _shown(self._at_start),
            )
            self._told = resident
        if hopeless or not self._reached(resident):
            return None
        return f"it takes {_shown(resident)} (option.executor_memory_limit={self._limit:g})"

    def _reached(self, resident: int) -> bool:
        return self._limit is not None and resident >= self._limit * _UNIT

    def may_recycle(self) -> bool:
        """Whether the last recycling is long enough ago; if so, this is the next."""
        now = asyncio.get_running_loop().time()
        if self._recycled_at is not None and now - self._recycled_at < _PAUSE_SECONDS:
            return False
        self._recycled_at = now
        return True


def _shown(size: int) -> str:
    return f"{size / _UNIT:.2f} GB"
