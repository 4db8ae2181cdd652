"""Long work beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


async def in_background(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread, so that the process can exit while it runs: compiling takes minutes."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(settler: Callable[[], None]) -> None:
        if not outcome.done():
            settler()

    def run() -> None:
        try:
            settler = partial(outcome.set_result, work())
        except BaseException as error:
            settler = partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, settler)

    threading.Thread(target=run, name="prepare", daemon=True).start()
    return await outcome
