"""Threads for work that would stop the event loop: tokenising, reading large requests, compiling.

Tokenising lets go of the GIL. Reading JSON does not, so the JSON is bounded (`read_json`).
"""

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, ParamSpec, TypeVar

from djl_trtllm.api.base import SMALL

P = ParamSpec("P")
T = TypeVar("T")

_MOST_THREADS = 4


class WorkerThreads(Executor):
    """Daemon threads: a process can end while one of them works. They are started when there is work for them."""

    def __init__(self, most: int = 0) -> None:
        self._most = most or min(_MOST_THREADS, os.cpu_count() or 1)
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._busy = 0

    def submit(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._busy += 1
            if self._busy > self._threads < self._most:
                self._threads += 1
                threading.Thread(target=self._serve, name=f"work-{self._threads}", daemon=True).start()
        self._work.put((future, lambda: work(*args, **kwargs)))
        return future

    @property
    def waiting(self) -> int:
        """How many pieces of work no thread has begun."""
        return max(0, self._busy - self._most)

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`. Work whose caller has left before a thread was free is not begun."""
        return await asyncio.get_running_loop().run_in_executor(self, work)

    def _serve(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # the caller's, whatever it is
                    future.set_exception(error)
            with self._lock:
                self._busy -= 1
            del future, work  # an idle thread keeps nothing of a request


WORKERS = WorkerThreads()
"""The threads of this process for the work of requests."""
LONG_WORK = WorkerThreads(32)
"""The threads for what takes seconds or minutes: preparing and compiling models, loading tokenizers."""


async def run_by_size(size: int, work: Callable[[], T]) -> T:
    """The result of work on `size` bytes: of few here, of many in a worker thread."""
    return work() if size <= SMALL else await WORKERS.run(work)
