"""What came of a request under DJL."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field


@dataclass
class DjlAnswer:
    """Chunks and when they came; `code` and `headers` as DJL would send them."""

    chunks: list[bytes] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    code: int = 0
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    error: str = ""
    """An exception in the place of an answer."""
    ended_at: float = 0.0
    _ended: threading.Event = field(default_factory=threading.Event)

    @property
    def body(self) -> bytes:
        """All chunks."""
        return b"".join(self.chunks)

    @property
    def ended(self) -> bool:
        """Whether its end has come."""
        return self._ended.is_set()

    def add(self, chunk: bytes) -> None:
        """A chunk came."""
        self.chunks.append(chunk)
        self.times.append(time.monotonic())

    def end(self) -> None:
        """Nothing more comes."""
        self.ended_at = time.monotonic()
        self._ended.set()

    def wait(self, timeout: float = 300.0) -> DjlAnswer:
        """Until its end; AssertionError after `timeout` seconds."""
        assert self._ended.wait(timeout), f"no end within {timeout:g} s; so far {self.body[-200:]!r}"
        return self
