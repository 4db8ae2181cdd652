"""An engine process under a client, and everything that came of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import uvloop

from djl_trtllm.errors import ExecutorDiedError
from djl_trtllm.executor.client import ExecutorClient
from djl_trtllm.executor.protocol import Delta, Start, Stats, Step, Submit
from djl_trtllm.request import FinishReason, Sampling
from tests.support import executors


class Probe:
    """A client, and everything that it was called back with."""

    def __init__(self, hang_timeout: float = 60.0) -> None:
        self.deltas: list[Delta] = []
        self.stats: list[Stats] = []
        self.deaths: list[ExecutorDiedError] = []
        self.busy = False
        self.looked = 0
        """How often the client has asked whether it is busy."""
        self._told = asyncio.Event()
        self.client = ExecutorClient(
            on_steps=self._on_steps, on_death=self._on_death, busy=self._is_busy, hang_timeout=hang_timeout
        )

    def _is_busy(self) -> bool:
        self.looked += 1
        return self.busy

    def _on_steps(self, steps: list[Step]) -> None:
        self.deltas += [delta for step in steps for delta in step.deltas]
        self.stats += [step.stats for step in steps]
        self._told.set()

    def _on_death(self, error: ExecutorDiedError) -> None:
        self.deaths.append(error)
        self._told.set()

    async def start(self, executor: str = executors.SCRIPTED, /, timeout: float = 60.0, **options: object) -> None:
        await self.client.start(Start(executor, options), timeout)

    def submit(self, request_id: int, tokens: int, prompt: tuple[int, ...] = (5, 6, 7), **fields: Any) -> None:
        """`fields` are those of Sampling and of Submit."""
        sampling = {name: fields.pop(name) for name in Sampling.__struct_fields__ if name in fields}
        self.client.submit(Submit(request_id, list(prompt), Sampling(tokens, **sampling), **fields))

    def of(self, request_id: int) -> list[Delta]:
        """The deltas of a request."""
        return [delta for delta in self.deltas if delta.request_id == request_id]

    def tokens(self, request_id: int) -> list[int]:
        """What a request generated."""
        return [token for delta in self.of(request_id) for token in delta.token_ids]

    def finish(self, request_id: int) -> FinishReason | None:
        """Why a request ended, exactly once and with nothing after; None while it runs."""
        own = self.of(request_id)
        ends = [FinishReason(delta.finish) for delta in own if delta.finish]
        assert len(ends) <= 1
        assert not ends or own[-1].finish
        return ends[0] if ends else None

    async def until(self, condition: Callable[[], bool], timeout: float = 60.0) -> None:
        async def wait() -> None:
            while not condition():
                self._told.clear()
                await self._told.wait()

        await asyncio.wait_for(wait(), timeout)

    async def end_of(self, *request_ids: int, timeout: float = 60.0) -> list[FinishReason | None]:
        """Wait until the requests have ended."""
        await self.until(lambda: all(self.finish(request_id) for request_id in request_ids), timeout)
        return [self.finish(request_id) for request_id in request_ids]

    async def death(self, timeout: float = 60.0) -> str:
        await self.until(lambda: bool(self.deaths), timeout)
        await asyncio.sleep(0.05)
        (error,) = self.deaths
        return str(error)


def has_ended(process: psutil.Process, seconds: float = 60) -> bool:
    """Whether a process ends in time. Nobody may be there to collect it: then it stays as a zombie."""
    for _ in range(round(seconds / 0.01)):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)
                continue
        return True
    return False


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def run_checked(body: Callable[[], Awaitable[None]], loop_name: str = "uvloop") -> None:
    """Run a test on the server's event loop, or asyncio's own.

    Afterwards no process, no file descriptor and no task may be left.
    """

    async def checked() -> None:
        loop = asyncio.get_running_loop()
        problems: list[object] = []
        loop.set_exception_handler(lambda _, context: problems.append(context))
        # The loop's own descriptors (signals, wake-ups, /dev/null) come with the first process.
        null, pipe = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec("true", stdin=null, stdout=pipe, stderr=null)
        await process.communicate()
        descriptors, tasks, others = psutil.Process().num_fds(), asyncio.all_tasks(), children()
        await body()
        for _ in range(50):
            if psutil.Process().num_fds() <= descriptors and asyncio.all_tasks() == tasks:
                break
            await asyncio.sleep(0.02)
        assert asyncio.all_tasks() == tasks
        assert psutil.Process().num_fds() <= descriptors
        assert children() <= others
        assert problems == []

    if loop_name == "uvloop":
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(asyncio.wait_for(checked(), 240))
        finally:
            loop.close()
    else:
        asyncio.run(asyncio.wait_for(checked(), 240))
