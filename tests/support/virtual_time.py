"""Tests in virtual time: what waits for a timer waits for nothing.

    async def test_a_request_past_its_deadline_is_ended(service: ModelService) -> None:
        ...
        await asyncio.sleep(600)

The loop's clock stands still while anything can run and jumps to the next timer when nothing can. Only a thread of the
program makes it wait: time passes then as it really does. A test may take an hour of this time, and leaves neither
task nor timer behind.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import selectors
import threading
import time
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar, cast

from typing_extensions import TypeVarTuple, Unpack

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_LIMIT_SECONDS = 3600.0
_POLL_SECONDS = 0.01
_POOL = ("asyncio_", "work-")
"""How asyncio's default executor, and the server's own, name their threads.

They live on when their work is done, which is counted instead."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 0 and is moved by its timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: weakref.WeakSet[asyncio.TimerHandle] = weakref.WeakSet()
        self._before = set(threading.enumerate())
        self._in_executor = 0
        self.endings: list[Callable[[], Coroutine[Any, Any, None]]] = []
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: Unpack[Ts],
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        handle = super().call_at(when, callback, *args, context=context)
        self._timers.add(handle)
        return handle

    def timers(self) -> set[asyncio.TimerHandle]:
        """The timers that will still run."""
        return {handle for handle in self._timers if handle.when() > self.now and not handle.cancelled()}

    @property
    def waits_for_threads(self) -> bool:
        """Whether a thread works that was started since."""
        started = set(threading.enumerate()) - self._before
        return self._in_executor > 0 or any(not thread.name.startswith(_POOL) for thread in started)

    def run_in_executor(
        self, executor: concurrent.futures.Executor | None, func: Callable[[Unpack[Ts]], T], *args: Unpack[Ts]
    ) -> asyncio.Future[T]:
        self._in_executor += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._left_executor)
        return future

    def _left_executor(self, _: object) -> None:
        self._in_executor -= 1


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # In this order: a thread that has ended since has left its news already.
        if self._loop.waits_for_threads:
            begun = time.monotonic()
            ready = super().select(_POLL_SECONDS if timeout is None else min(timeout, _POLL_SECONDS))
            self._loop.now += time.monotonic() - begun
            return ready
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will come"
            # Rounded, so that a sum of tenths is what it is on paper.
            self._loop.now = round(self._loop.now + timeout, 10)
        return ready


def run(body: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time. It may leave neither task nor timer behind."""
    loop = VirtualLoop()

    async def checked() -> T:
        before = asyncio.all_tasks(), loop.timers()
        try:
            result = await body
        finally:
            while loop.endings:
                await loop.endings.pop()()
        await asyncio.sleep(0)
        assert (asyncio.all_tasks(), loop.timers()) == before, "tasks or timers are left"
        return result

    try:
        return loop.run_until_complete(asyncio.wait_for(checked(), _LIMIT_SECONDS))
    finally:
        if left := asyncio.all_tasks(loop):
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def at_end(ending: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Have this run at the end of the test, before what was asked for earlier."""
    cast(VirtualLoop, asyncio.get_running_loop()).endings.append(ending)


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else go on until a condition holds."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine function."""

    @functools.wraps(test)
    def running(*args: P.args, **kwargs: P.kwargs) -> None:
        run(test(*args, **kwargs))

    return cast(Callable[P, None], running)


def in_real_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Makes a test of a coroutine function, on asyncio's own event loop, that takes two minutes at most."""

    @functools.wraps(test)
    def running(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*args, **kwargs), 120))

    return running


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
