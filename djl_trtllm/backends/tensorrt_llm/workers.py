"""The processes in which TensorRT-LLM's ranks run."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

_MARKS = ("mpi4py", "tensorrt_llm")


class Workers:
    """Processes whose death means that the engine is lost."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = tuple(processes)

    @classmethod
    def of_this_process(cls) -> Workers:
        """The ranks below this process, once the engine is loaded.

        They are known by their command line: a compiler's helpers, which may end at any time, are below it as well.
        Ranks that a launcher started (mpirun, trtllm-llmapi-launch) are not below it, and are not watched.
        """
        return cls([process for process in psutil.Process().children(recursive=True) if _is_rank(process)])

    def __len__(self) -> int:
        return len(self._processes)

    def dead(self) -> list[int]:
        return [process.pid for process in self._processes if not _is_alive(process)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return any(mark in argument for argument in command for mark in _MARKS)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
