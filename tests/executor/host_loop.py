"""Virtual time for a client whose host is played."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

from typing_extensions import TypeVarTuple, Unpack

from tests.support.virtual_time import VirtualLoop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_FOR_EVER = 1_000_000.0


class HostLoop(VirtualLoop):
    """What is handed to an executor runs at once, and takes `executor_seconds()` of virtual time."""

    def __init__(self) -> None:
        self.executor_seconds: Callable[[], float] = lambda: 0.0
        super().__init__()

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        self.call_later(self.executor_seconds(), self._complete, future, func(*args))
        return future

    @staticmethod
    def _complete(future: asyncio.Future[T], result: T) -> None:
        if not future.done():
            future.set_result(result)


def run_with_loop(body: Callable[[HostLoop], Awaitable[T]]) -> T:
    """Run a coroutine function that gets its loop. It may leave no task, and no exception that nobody has seen."""
    gc.freeze()  # so that looking for loose ends is quick
    loop = HostLoop()
    problems: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: problems.append(context))

    async def whole() -> T:
        result = await asyncio.wait_for(body(loop), _FOR_EVER)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left
        return result

    try:
        result = loop.run_until_complete(whole())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        gc.collect()
        gc.unfreeze()
    assert problems == []
    return result
