"""Signs of life of a loaded TensorRT-LLM: its ranks, its own errors and its statistics."""

import contextlib
import itertools
import os
from collections.abc import Mapping
from typing import Any

import psutil

from djl_trtllm.executor.protocol import Stats

LAUNCHED = "TLLM_SPAWN_PROXY_PROCESS"
"""`trtllm-llmapi-launch` sets this variable to 1: there are ranks already, on other machines too."""
_MODULES = ("mpi4py", "tensorrt_llm")


def ranks_below() -> list[psutil.Process]:
    """The ranks below this process, once the engine is loaded; the death of one means that the engine is lost."""
    return [process for process in psutil.Process().children(recursive=True) if is_rank(process)]


def launched_ranks() -> list[psutil.Process]:
    """The ranks of trtllm-llmapi-launch on this machine, of which the leader is beside this process or its parents."""
    if os.environ.get(LAUNCHED) == "1":
        for above in psutil.Process().parents():
            with contextlib.suppress(psutil.Error):  # it has ended
                if ranks := [process for process in (above, *above.children(recursive=True)) if is_rank(process)]:
                    return ranks
    return []


def dead(ranks: list[psutil.Process]) -> list[int]:
    """Return the ids of the ranks that have ended."""
    return [process.pid for process in ranks if not is_alive(process)]


def is_rank(process: psutil.Process) -> bool:
    """Return whether this is a process of MPI that runs TensorRT-LLM's tasks.

    They are `python -m mpi4py.futures.server` and a launcher's `python -m tensorrt_llm.llmapi.mgmn_leader_node`.

    Others below may end at any time, such as the compilers of kernels, whose arguments have TensorRT-LLM's folders.
    """
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return any(flag == "-m" and module.startswith(_MODULES) for flag, module in itertools.pairwise(command))


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process still runs. A zombie, which its parent has not collected yet, does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def background_error(llm: Any) -> Exception | None:
    """Return an error of TensorRT-LLM's background threads that it has not raised yet; None if there is none.

    TensorRT-LLM raises the error at the next request or response, but shuts itself down before that: it sends aborts to
    a worker that may be gone, and never returns.
    """
    errors = getattr(getattr(llm, "_executor", None), "_error_queue", None)
    waiting: list[Exception] = [] if errors is None else list(errors.queue)
    return waiting[0] if waiting else None


def trouble_of(llm: Any) -> str | None:
    """Return why an LLM cannot go on; None while it can.

    Before 1.3 TensorRT-LLM raises an error of its background threads only at the next request or response, and a worker
    that has failed sends nothing; so this reads where they leave it (`executor/executor.py`, about 1.2).
    """
    if (error := background_error(llm)) is not None:
        return f"{type(error).__name__}: {error}"
    executor = getattr(llm, "_executor", None)
    if hasattr(llm, "_check_health"):
        return None if llm._check_health() else "it reports that it is not healthy"
    if executor is None or (hasattr(executor, "is_shutdown") and executor.is_shutdown()):
        return "it has shut down"
    return None


class IterationStatistics:
    """The last iteration that the engine reported (keys: `IterationStats` of TensorRT-LLM's executor).

    `counts_queued`: PyExecutor's `numQueuedRequests` is the inbox of its loop, which an iteration empties. What waits
    in it are the requests that are not active.
    """

    def __init__(self, *, counts_queued: bool) -> None:
        self._counts_queued = counts_queued
        self._last: Mapping[str, Any] = {}
        self._draft_tokens: int | None = None
        self._drafts: int | None = None

    def take(self, iteration: Mapping[str, Any]) -> None:
        self._last = iteration
        if drafted := iteration.get("specDecodingStats"):  # those of this iteration alone
            self._draft_tokens = (self._draft_tokens or 0) + drafted.get("numDraftTokens", 0)
            self._drafts = (self._drafts or 0) + drafted.get("numRequestsWithDraftTokens", 0)

    def stats(self, running: int) -> Stats:
        """Return the statistics with `running` requests in the engine; without any, all blocks are free."""
        last = self._last
        cache = last.get("kvCacheStats") or {}
        batch = last.get("inflightBatchingStats") or {}
        total = cache.get("maxNumBlocks") or None
        used, queued, paused = (
            value if running or value is None else 0
            for value in (cache.get("usedNumBlocks"), self._queued(running), batch.get("numPausedRequests"))
        )
        milliseconds = last.get("iterLatencyMS")
        return Stats(
            running=max(0, running - (queued or 0)),
            kv_usage=None if total is None or used is None else used / total,
            queued=queued,
            paused=paused,
            iterations=last.get("iter"),
            iteration_seconds=None if milliseconds is None else milliseconds / 1000,
            kv_blocks=total,
            kv_blocks_used=None if total is None else used,
            kv_hit_rate=cache.get("cacheHitRate"),
            draft_tokens=self._draft_tokens,
            drafts=self._drafts,
        )

    def _queued(self, running: int) -> int | None:
        queued: int | None = self._last.get("numQueuedRequests")
        active: int | None = self._last.get("numActiveRequests")
        if self._counts_queued or active is None:
            return queued
        return max(queued or 0, running - active)
