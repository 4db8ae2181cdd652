"""The processes of TensorRT-LLM's ranks, below the process that started them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

DIED = "a rank of TensorRT-LLM ended before its time"
_MARKS = ("mpi4py", "tensorrt_llm")
_POLL_SECONDS = 0.2
_STATUS = 3


@contextmanager
def ending_with_ranks() -> Iterator[None]:
    """End this process (status 3, and a line with `DIED`) when a rank below it ends inside the block.

    TensorRT-LLM waits for ever for a rank that is gone.
    """
    over = threading.Event()
    threading.Thread(target=_watch, args=(over,), name="rank-watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def ranks_below() -> list[psutil.Process]:
    """The ranks below this process, once the engine is loaded; the death of one means that the engine is lost.

    They are known by their command line: a compiler's helpers, which may end at any time, are below it as well. Ranks
    that a launcher started (mpirun, trtllm-llmapi-launch) are not below it, and are not watched.
    """
    return [process for process in psutil.Process().children(recursive=True) if _is_rank(process)]


def dead(ranks: list[psutil.Process]) -> list[int]:
    """The ids of those that have ended."""
    return [process.pid for process in ranks if not _is_alive(process)]


def _watch(over: threading.Event) -> None:
    ranks: set[psutil.Process] = set()
    while not over.wait(_POLL_SECONDS):
        living = {process for process in psutil.Process().children(recursive=True) if _is_alive(process)}
        ranks |= {process for process in living - ranks if _is_rank(process)}
        for lost in ranks - living:
            if not over.is_set():
                print(f"{DIED} (process {lost.pid})", flush=True)
                os._exit(_STATUS)


def _is_rank(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(mark in command for mark in _MARKS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
