"""Requests with a guide, on their way into the engine.

A guide is tried in a process of its own, then compiled in a thread, and only then does its request reach the pipeline,
which finds the compiled guide. So an unusable guide is the error of its own request, and other requests wait for
nothing but the parsing of a guide.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from djl_trtllm.executor.guide_checker import GuideChecker, Key, key_of
from djl_trtllm.executor.protocol import Delta, Refusal, Submit
from djl_trtllm.request import FinishReason, Guide

_WAIT_SECONDS = 0.005
_MOST_COMPILED = 256
"""Guides that stay compiled. Each takes about 100 KB, and the engine itself forgets none."""


class Compiler(Protocol):
    """What is needed of a `GuideCompiler`."""

    def compile(self, guide: Guide) -> None:
        """Raises RuntimeError."""

    def forget(self) -> None:
        """Free what was compiled."""


class GuidedRequests:
    """`make_compiler` gets the number of logits of the model, in the thread that compiles."""

    def __init__(self, checker: GuideChecker, make_compiler: Callable[[int], Compiler]) -> None:
        self._checker = checker
        self._make_compiler = make_compiler
        self._compiler: Compiler | None = None
        self._held: dict[int, tuple[Key, Guide, Submit]] = {}
        self._thread = ThreadPoolExecutor(1, "guide-compiler")
        self._compiling: tuple[Key, Future[None]] | None = None
        self._compiled: set[Key] = set()

    @property
    def waiting(self) -> bool:
        return bool(self._held)

    def hold(self, request: Submit) -> Delta | None:
        """Keep a request until its guide is compiled; its terminal delta if that can never be."""
        guide = request.guide
        assert guide is not None
        if request.sampling.min_new_tokens or request.sampling.ignore_eos:
            named = "min_new_tokens" if request.sampling.min_new_tokens else "ignore_eos"
            return _refused(request, f"'{named}' with a guide: the guide says where the output ends; leave out one")
        key = key_of(guide)
        self._checker.check(key, guide)
        self._held[request.request_id] = key, guide, request
        return None

    def cancel(self, request_id: int) -> Delta | None:
        """The terminal delta of a request that is held; None for all others."""
        if self._held.pop(request_id, None) is None:
            return None
        return Delta(request_id, [], finish=FinishReason.CANCELLED)

    def advance(self, *, wait: bool) -> tuple[list[Submit], list[Delta]]:
        """The requests whose guides are compiled now, and the terminal deltas of those whose guides cannot be used.

        `wait`: for some milliseconds, if there is nothing yet.
        """
        if wait and self._checker.idle and self._compiling is not None:
            futures.wait([self._compiling[1]], _WAIT_SECONDS)
        self._checker.poll(_WAIT_SECONDS if wait else 0.0)
        ready: list[Submit] = []
        deltas: list[Delta] = []
        for key, guide, request in list(self._held.values()):
            verdict = self._checker.verdict(key)
            if verdict is None:
                self._checker.check(key, guide)  # its verdict may have been forgotten
                continue
            problem = verdict.problem
            if problem is None:
                done, problem = self._is_compiled(key, guide, verdict.vocabulary)
                if not done and problem is None:
                    continue
            del self._held[request.request_id]
            if problem is None:
                ready.append(request)
            else:
                deltas.append(_refused(request, f"the guide cannot be used: {problem}"))
        return ready, deltas

    def close(self) -> None:
        self._checker.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _is_compiled(self, key: Key, guide: Guide, vocabulary: int) -> tuple[bool, str | None]:
        """Whether a guide is compiled, and its problem. Begins to compile it if the thread has nothing to do."""
        if self._compiling is not None:
            current, future = self._compiling
            if not future.done():
                return key in self._compiled, None
            self._compiling = None
            if (error := future.exception()) is None:
                self._compiled.add(current)
            elif current == key:
                return False, str(error)
        if key in self._compiled:
            return True, None
        if len(self._compiled) >= _MOST_COMPILED and self._compiler is not None:
            # Between two steps and while nothing compiles: the tokenizer's cache has no lock of its own.
            self._compiler.forget()
            self._compiled.clear()
        self._compiling = key, self._thread.submit(self._compile, guide, vocabulary)
        return False, None

    def _compile(self, guide: Guide, vocabulary: int) -> None:
        if self._compiler is None:
            self._compiler = self._make_compiler(vocabulary)
        self._compiler.compile(guide)


def _refused(request: Submit, message: str) -> Delta:
    return Delta(request.request_id, [], finish=FinishReason.ERROR, error=Refusal(message))
