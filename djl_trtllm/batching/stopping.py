"""Stop strings, found across token borders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string in the text fed so far; `start` is its first character's offset from the text's beginning."""

    stop: str
    start: int


class StopMatcher:
    """Watches a text that arrives in pieces.

    After each piece, all characters before `safe` may be shown: no stop string can begin there. The stop string that
    begins first wins; of several at one place, the longest.
    """

    __slots__ = ("_buffer", "_longest", "_offset", "_stops", "safe")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._longest = len(self._stops[0])
        self._buffer = ""
        self._offset = 0
        self.safe = 0

    def feed(self, text: str) -> StopMatch | None:
        """Take in the next piece; the match, if it completes one."""
        self._buffer += text
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = self._buffer.find(stop)
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is not None:
            self.safe = self._offset + found[0]
            return StopMatch(found[1], self.safe)
        held = self._possible_start()
        self.safe = self._offset + held
        self._offset += held
        self._buffer = self._buffer[held:]
        return None

    def _possible_start(self) -> int:
        """Where the longest end of the buffer begins that could grow into a stop string."""
        length = len(self._buffer)
        for start in range(max(0, length - self._longest + 1), length):
            tail = self._buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return length
