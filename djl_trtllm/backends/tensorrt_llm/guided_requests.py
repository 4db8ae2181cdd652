"""Requests with a guide, on their way into TensorRT-LLM.

TensorRT-LLM compiles a guide in the loop that serves all requests. A bad one was the end of that loop before #9078
(November 2025), and on the engine backend it may fail every active request. So a guide is tried before, in a process of
its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context

from djl_trtllm.executor.guide_checker import GuideChecker, Key, key_of
from djl_trtllm.executor.protocol import Submit
from djl_trtllm.request import Guide

_POLL_SECONDS = 0.005


class GuidedRequests:
    """`submit` gets the requests whose guides can be used, `refuse` the others, with the problem."""

    def __init__(
        self, checker: GuideChecker, submit: Callable[[Submit], None], refuse: Callable[[Submit, str], None]
    ) -> None:
        self._checker = checker
        self._submit = submit
        self._refuse = refuse
        self._held: dict[int, tuple[Key, Guide, Submit, Context]] = {}
        self._polling: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Requests that are held."""
        return len(self._held)

    def hold(self, request: Submit) -> None:
        """Keep a request until its guide was tried, which one of an earlier request may have been."""
        guide = request.guide
        assert guide is not None
        key = key_of(guide)
        # What is printed for it later is marked as what is printed now.
        self._held[request.request_id] = key, guide, request, copy_context()
        self._checker.check(key, guide)
        self._release()
        if self._held and (self._polling is None or self._polling.done()):
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    def cancel(self, request_id: int) -> Submit | None:
        """The request, if it is held; it is not any more."""
        held = self._held.pop(request_id, None)
        return None if held is None else held[2]

    def close(self) -> None:
        if self._polling is not None:
            self._polling.cancel()
        self._checker.close()

    async def _poll(self) -> None:
        while self._held:
            await asyncio.sleep(_POLL_SECONDS)
            self._checker.poll(0.0)
            self._release()

    def _release(self) -> None:
        for key, guide, request, context in list(self._held.values()):
            verdict = self._checker.verdict(key)
            if verdict is None:
                self._checker.check(key, guide)  # its verdict may have been forgotten
                continue
            del self._held[request.request_id]
            if verdict.problem is None:
                context.run(self._submit, request)
            else:
                context.run(self._refuse, request, verdict.problem)
