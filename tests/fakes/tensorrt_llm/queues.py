"""The queue between the dispatch thread and the consumers, and what runs that thread (facts §2.6, §4.3)."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import hmac
import os
import pickle
import select
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.connection import Client, Connection, Listener
from queue import Queue
from typing import Any

from .settings import logger


class AsyncQueue:
    """A queue that a thread fills through `sync_q` and a coroutine empties."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._event = asyncio.Event()

        self.sync_q = SyncQueue(self)

    def empty(self) -> bool:
        return not self._items

    def put_nowait(self, item: Any) -> None:
        self._items.append(item)

    def notify(self) -> None:
        # The item may have been taken before the loop came to this.
        if self._items:
            self._event.set()

    async def get(self, timeout: float | None = None) -> Any:
        """The next item. TimeoutError after `timeout` seconds; None waits for ever."""

        if timeout is None:
            while not self._items:
                await self._event.wait()
        elif timeout > 0:
            loop = asyncio.get_running_loop()
            deadline = loop.time() + timeout
            while not self._items:
                remaining = deadline - loop.time()
                if remaining <= 0:
                    raise asyncio.TimeoutError
                await asyncio.wait_for(self._event.wait(), timeout=remaining)
        elif not self._items:
            raise asyncio.QueueEmpty
        item = self._items.popleft()
        if not self._items:
            self._event.clear()
        return item


class SyncQueue:
    """The thread's side of an AsyncQueue."""

    def __init__(self, queue: AsyncQueue) -> None:
        self._queue = queue
        self.loop = asyncio.get_event_loop()

    def put_nowait(self, item: Any) -> None:
        self._queue.put_nowait(item)

    @staticmethod
    async def _notify_many(queues: Iterable[SyncQueue]) -> None:
        for queue in queues:
            queue._queue.notify()

    @staticmethod
    def notify_many(queues: list[SyncQueue]) -> None:
        """Wake everyone who waits on `queues`, in one go of the loop; of a loop that has ended, nobody."""
        if queues and queues[0].loop.is_running():
            asyncio.run_coroutine_threadsafe(SyncQueue._notify_many(frozenset(queues)), queues[0].loop)


class ManagedThread(threading.Thread):
    """Runs `task` until it returns False; an exception goes to `error_queue`, and the thread goes on."""

    def __init__(self, task: weakref.WeakMethod[Callable[[], bool]], error_queue: Queue[Any], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._task = task
        self._error_queue = error_queue
        self._stop_event = threading.Event()

    def run(self) -> None:
        while not self._stop_event.is_set():
            task = self._task()
            if task is None:
                break
            try:
                if not task():
                    break
            except Exception as error:
                logger.error(f"Error in thread {self.name}: {error}\n{traceback.format_exc()}")
                self._error_queue.put(error)
            del task
        logger.info(f"Thread {self.name} stopped.")

    def stop(self) -> None:
        self._stop_event.set()


# -- one-way message queues between the processes: pickled and signed (executor/ipc.py; facts §4.3) --------------------


class IpcQueue:
    """The server side makes the address and its key; the client connects to them."""

    def __init__(self, directory: str | None = None, name: str = "", address: tuple[str, bytes] | None = None) -> None:
        self._listener: Listener | None = None
        self._connection: Connection | None = None
        if address is None:
            address = (f"{directory}/{name}", os.urandom(32))
            self._listener = Listener(address[0], "AF_UNIX")
        else:
            self._connection = Client(address[0], "AF_UNIX")
        self.address = address
        self._key = address[1]
        self._outgoing: deque[bytes] = deque()
        self._wake = threading.Event()
        self._sender: threading.Thread | None = None

    def accept(self, timeout: float) -> bool:
        """The server side: wait for the client, for this number of seconds."""
        listener: Any = self._listener
        ready, _, _ = select.select([listener._listener._socket], [], [], timeout)
        if ready:
            self._connection = listener.accept()
        return bool(ready)

    def put(self, item: Any) -> None:
        """Sent by another thread, however slow the other side reads: ZeroMQ's queue has no bound here (`set_hwm(0)`).

        A PAIR whose other side is gone waits for another one, though.
        """
        if self._is_alone():
            threading.Event().wait()
        self.put_noblock(item)

    def _is_alone(self) -> bool:
        # Where this side sends, it is sent nothing: what can be read is the end.
        return self._connection is not None and self._connection.poll(0)

    def put_noblock(self, item: Any) -> None:
        """The same, and lost where the other side is gone."""
        self._outgoing.append(self._sign(pickle.dumps(item)))
        if self._sender is None:
            self._sender = threading.Thread(target=self._send, daemon=True)
            self._sender.start()
        self._wake.set()

    def put_blocking(self, item: Any) -> None:
        """Waits while the other side does not read: an engine without a pace is as fast as its reader."""
        assert self._connection is not None
        self._connection.send_bytes(self._sign(pickle.dumps(item)))

    def _sign(self, data: bytes) -> bytes:
        return data + hmac.new(self._key, data, hashlib.sha256).digest()

    def _send(self) -> None:
        assert self._connection is not None
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._outgoing:
                try:
                    self._connection.send_bytes(self._outgoing.popleft())
                except OSError:
                    return

    def poll(self, timeout: float | None = 0.0) -> bool:
        assert self._connection is not None
        return self._connection.poll(timeout)

    def get(self) -> Any:
        assert self._connection is not None
        data = self._connection.recv_bytes()
        message = data[:-32]
        if not hmac.compare_digest(hmac.new(self._key, message, hashlib.sha256).digest(), data[-32:]):
            raise RuntimeError("HMAC verification failed")
        return pickle.loads(message)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._listener is not None:
            self._listener.close()
