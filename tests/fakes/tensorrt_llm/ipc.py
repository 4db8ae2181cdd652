"""One-way message queues between the processes: pickled, signed, and never blocking the sender (facts §4.3)."""

from __future__ import annotations

import hashlib
import hmac
import os
import pickle
import select
import threading
from collections import deque
from multiprocessing.connection import Client, Connection, Listener
from typing import Any


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
        """Sent by another thread, however slow the other side reads."""
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
