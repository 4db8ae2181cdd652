from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from djl_trtllm.service.background import in_background
from tests.support.virtual_time import in_virtual_time


@in_virtual_time
async def test_work_runs_in_a_thread_that_the_end_of_the_process_does_not_wait_for() -> None:
    thread = await in_background(threading.current_thread)
    assert (thread.name, thread.daemon) == ("prepare", True)


@in_virtual_time
async def test_what_is_wrong_in_the_work_is_raised() -> None:
    def broken() -> None:
        raise ValueError("no such engine")

    def exiting() -> None:
        raise SystemExit(3)

    with pytest.raises(ValueError, match="no such engine"):
        await in_background(broken)
    with pytest.raises(SystemExit):
        await in_background(exiting)


@in_virtual_time
async def test_the_outcome_of_cancelled_work_is_dropped() -> None:
    begun, free = threading.Event(), threading.Event()
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))

    def work() -> None:
        begun.set()
        assert free.wait(60)

    task = asyncio.ensure_future(in_background(work))
    await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    free.set()
    await asyncio.to_thread(joined("prepare"))
    await asyncio.sleep(0.1)
    assert wrong == []


def test_an_outcome_that_comes_after_the_loop_is_no_error() -> None:
    # pytest turns an exception of a thread into an error.
    free = threading.Event()

    async def leave() -> None:
        task = asyncio.ensure_future(in_background(lambda: free.wait(60)))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    threads = [thread for thread in threading.enumerate() if thread.name == "prepare"]
    assert len(threads) == 1
    free.set()
    threads[0].join(60)


def joined(name: str) -> Callable[[], None]:
    """Waits for all threads of a name."""

    def join() -> None:
        for thread in threading.enumerate():
            if thread.name == name:
                thread.join(60)

    return join
