"""The processes in which TensorRT-LLM's ranks run."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from djl_trtllm.backends.tensorrt_llm.ranks import is_alive, is_rank


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
        return cls([process for process in psutil.Process().children(recursive=True) if is_rank(process)])

    def __len__(self) -> int:
        return len(self._processes)

    def dead(self) -> list[int]:
        return [process.pid for process in self._processes if not is_alive(process)]
