"""Reads the images of requests beside the engine's loop: decoding a large one takes longer than many iterations."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from djl_trtllm.executor.protocol import Submit


class ImageGate:
    """Holds requests until a thread has read their images, in the order in which they came.

    `read` runs in the thread, for one request at a time, which bounds the memory of decoding; Pillow decodes and scales
    without the GIL. `submit` gets a request with what `read` returned, `fail` one with the exception that it raised.
    Nothing waits but `advance`, which a synchronous engine's loop calls while the gate holds requests.
    """

    def __init__(
        self,
        read: Callable[[Submit], Any],
        submit: Callable[[Submit, Any], None],
        fail: Callable[[Submit, Exception], None],
    ) -> None:
        self._read = read
        self._submit = submit
        self._fail = fail
        self._thread = ThreadPoolExecutor(1, "images")
        self._held: dict[int, tuple[Submit, Future[Any]]] = {}

    def __len__(self) -> int:
        """Return the number of requests that are held."""
        return len(self._held)

    def hold(self, request: Submit) -> None:
        self._held[request.request_id] = request, self._thread.submit(self._read, request)

    def cancel(self, request_id: int) -> bool:
        """Hold a request no longer. False if it is not held."""
        _, reading = self._held.pop(request_id, (None, None))
        if reading is not None:
            reading.cancel()
        return reading is not None

    def advance(self, seconds: float = 0.0) -> None:
        """Let requests through whose images are read, after waiting up to `seconds` for the first of them."""
        wait([reading for _, reading in self._held.values()], seconds, FIRST_COMPLETED)
        for request, reading in list(self._held.values()):
            if not reading.done():
                return
            del self._held[request.request_id]
            error = reading.exception()
            if error is None:
                self._submit(request, reading.result())
            elif isinstance(error, Exception):
                self._fail(request, error)
            else:
                raise error

    def close(self) -> None:
        """Hold nothing longer, and end the thread, when it has read what it reads now."""
        self._held.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)


class AsyncImageGate(ImageGate):
    """A gate that the running event loop advances when the images of a request are read."""

    def hold(self, request: Submit) -> None:
        super().hold(request)
        loop = asyncio.get_running_loop()

        def advance(_: Future[Any]) -> None:
            with contextlib.suppress(RuntimeError):  # too late: the loop is closed
                loop.call_soon_threadsafe(self.advance)

        self._held[request.request_id][1].add_done_callback(advance)
