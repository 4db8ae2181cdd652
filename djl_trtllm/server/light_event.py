"""An event that takes little memory."""

from __future__ import annotations

import asyncio


class LightEvent:
    """An `asyncio.Event`, which has room for 64 that wait: every connection would have two of those, 760 bytes each."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        if self._is_set:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting += (waiting,)
        try:
            await waiting
        finally:
            self._waiting = tuple(each for each in self._waiting if each is not waiting)
