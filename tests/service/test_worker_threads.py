"""A bounded number of threads works beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from djl_trtllm.service.worker_threads import WorkerThreads
from tests.support.virtual_time import until


def test_no_more_threads_work_than_there_may_be_and_the_rest_waits() -> None:
    threads, free = WorkerThreads(2), threading.Event()
    begun: list[str] = []

    def work() -> None:
        begun.append(threading.current_thread().name)
        assert threading.current_thread().daemon
        assert free.wait(60)

    async def main() -> None:
        tasks = [asyncio.ensure_future(threads.run(work)) for _ in range(5)]
        await until(lambda: len(begun) == 2)
        assert threads.waiting == 3
        tasks[4].cancel()
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not threads._busy)

    asyncio.run(main())
    assert (len(begun), set(begun)) == (4, {"work-1", "work-2"})


class Panic(BaseException):
    pass


@pytest.mark.parametrize("error", [ValueError("no"), Panic("no")])
def test_who_waits_gets_the_result_or_the_error_of_whatever_kind(error: BaseException) -> None:
    threads = WorkerThreads(1)

    def fail() -> None:
        raise error

    async def main() -> None:
        with pytest.raises(type(error), match="no"):
            await threads.run(fail)
        assert await threads.run(lambda: 3) == 3

    asyncio.run(main())
