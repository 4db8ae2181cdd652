"""Async mode: many responses on one socket, with one write for everything that is waiting.

djl_python queues what a handler's generator yields, and a thread calls `send(socket)` on each entry in turn. Frames on
the socket delimit themselves and name their request, so one object can carry the output of all requests: `Streams`
chooses what to send only when its turn comes. Under backlog, tokens merge by themselves. DJL's hand-over between
threads, the largest cost there, happens once per write instead of once per token.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import AsyncGenerator

from djl_trtllm.djl.item import Item, content, count, take, text

_TRACKING_ID = "request_tracking_id"
_OK = count(200) + text("OK")


class Stream:
    """The items of one request on their way to DJL, which identifies it by its tracking id."""

    def __init__(self, streams: Streams, tracking_id: str) -> None:
        self._streams = streams
        self._tracking = text(_TRACKING_ID) + text(tracking_id)
        self._plain = _OK + count(1) + self._tracking + count(1)
        self._woken = asyncio.Event()
        self._carries = False
        self._complete = False

    def put(self, item: Item) -> None:
        """Send an item as soon as the socket accepts it."""
        if self._streams.add(self, item):
            self._carries = True
            self._woken.set()
        if item.last:
            self._complete = True
            self._woken.set()

    async def carry(self) -> AsyncGenerator[Streams, None]:
        """Yield what djl_python is to send, until the response is complete."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self._carries:
                self._carries = False
                yield self._streams
            if self._complete and not self._carries:
                return

    def frame(self, item: Item) -> bytes:
        """An item as a frame on DJL's socket: status, message, properties, contents."""
        if not item.properties:
            return self._plain + content(item.encode())
        pairs = b"".join(text(key) + text(value) for key, value in item.properties)
        return _OK + count(1 + len(item.properties)) + self._tracking + pairs + count(1) + content(item.encode())


class Streams:
    """All items that wait to be sent. At most one reference to it is in djl_python's queue."""

    def __init__(self) -> None:
        # Appended on the event loop, drained in djl_python's sender thread.
        self._waiting: deque[tuple[Stream, Item]] = deque()
        self._queued = False

    def add(self, stream: Stream, item: Item) -> bool:
        """Add an item. True if `stream` has to put this object into the queue."""
        self._waiting.append((stream, item))
        if self._queued:
            return False
        self._queued = True
        return True

    # -- called by djl_python --------------------------------------------------------------------------------------

    def add_property(self, key: str, value: object) -> None:
        """Ignore the tracking id of the request that queued this object; every frame has its own."""

    def send(self, connection: socket.socket) -> None:
        # Reset first: an item added from now on is either seen below, or queued again.
        self._queued = False
        pending: dict[Stream, deque[Item]] = {}
        while self._waiting:
            stream, item = self._waiting.popleft()
            pending.setdefault(stream, deque()).append(item)
        frames: list[bytes] = []
        for stream, items in pending.items():
            while items:
                frames.append(stream.frame(take(items)))
        if frames:
            connection.sendall(b"".join(frames))
