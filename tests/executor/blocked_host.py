"""A host whose engine blocks the event loop for ever, as TensorRT-LLM's queues do when their other end is gone."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any

from djl_trtllm.executor import process as host
from djl_trtllm.executor.protocol import Limits, Stats, Submit
from djl_trtllm.executor.step_buffer import StepBuffer


class BlockedExecutor:
    """See `djl_trtllm.executor.process.AsyncExecutor`."""

    def __init__(self) -> None:
        self.limits = Limits(1, 0, 32, 100)
        self.details: dict[str, Any] = {}
        self.features: frozenset[str] = frozenset()
        self._lost = False

    async def run(self, step_buffer: StepBuffer) -> None:
        await asyncio.Event().wait()

    def check(self) -> None:
        if self._lost:
            raise RuntimeError("the other end is gone")

    async def close(self) -> None:
        pass

    def submit(self, request: Submit) -> None:
        print("submitting", request.request_id, file=sys.stderr)
        self._lost = True
        time.sleep(1e6)

    def cancel(self, request_id: int) -> None:
        pass

    def stats(self) -> Stats:
        return Stats()


if __name__ == "__main__":
    sys.exit(host.main())
