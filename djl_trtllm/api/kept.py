"""A store of responses for later requests, such as those that continue a conversation.

An entry belongs to the API key of its request, whose other requests find it. It expires, and the memory of all entries
is bounded: the key with the most loses its oldest entry, so that no key drives out those of the others.
"""

import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import NamedTuple

from djl_trtllm.config import Options


class Entry(NamedTuple):
    """The parts of an entry, as bytes; `last_used` is when it was kept, or found last."""

    parts: tuple[bytes, ...]
    size: int
    last_used: float


_OVERHEAD = 512
"""Bytes that an entry takes beside its parts."""


class Kept:
    """The entries of one model, by API key and name. Its methods may be called from any thread.

    All entries together have `stored_responses_memory`. A larger entry is not kept.
    """

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_bytes = options.stored_responses_memory
        self._seconds = options.stored_responses_timeout
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: defaultdict[str, OrderedDict[str, Entry]] = defaultdict(OrderedDict)
        """The entries of each key, the least recently used first."""
        self._sizes: dict[str, int] = {}

    @property
    def size(self) -> int:
        """The bytes of all entries."""
        return sum(self._sizes.values())

    def size_of(self, key: str) -> int:
        """The bytes of the entries of a key."""
        return self._sizes.get(key, 0)

    def keep(self, key: str, name: str, parts: tuple[bytes, ...]) -> None:
        size = sum(map(len, parts)) + _OVERHEAD
        with self._lock:
            now = self._clock()
            for owner in list(self._entries):
                self._expire(owner, now - self._seconds)
            if size > self._most_bytes:
                return
            self._entries[key][name] = Entry(parts, size, now)
            self._sizes[key] = self._sizes.get(key, 0) + size
            while self.size > self._most_bytes:
                largest = max(self._sizes, key=self._sizes.__getitem__)
                self._drop(largest, next(iter(self._entries[largest])))

    def find(self, key: str, name: str) -> tuple[bytes, ...] | None:
        """The parts of an entry, which is used now; None if there is none, or it has expired."""
        with self._lock:
            now = self._clock()
            if key in self._entries:
                self._expire(key, now - self._seconds)
            entry = self._entries[key].get(name) if key in self._entries else None
            if entry is None:
                return None
            self._entries[key][name] = entry._replace(last_used=now)
            self._entries[key].move_to_end(name)
            return entry.parts

    def remove(self, key: str, name: str) -> bool:
        """Remove an entry. False if there is none."""
        with self._lock:
            found = key in self._entries and name in self._entries[key]
            if found:
                self._drop(key, name)
            return found

    def _expire(self, key: str, before: float) -> None:
        while key in self._entries:
            name, entry = next(iter(self._entries[key].items()))
            if entry.last_used > before:
                return
            self._drop(key, name)

    def _drop(self, key: str, name: str) -> None:
        self._sizes[key] -= self._entries[key].pop(name).size
        if not self._entries[key]:
            del self._entries[key], self._sizes[key]
