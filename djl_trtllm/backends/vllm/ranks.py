"""The processes that vLLM starts for the GPUs of one model, such as `VllmWorker-1` for the second one.

`MultiprocExecutor` (vllm/v1/executor/multiproc_executor.py, 0.26 to 0.33) starts them by multiprocessing from this
process if a model has several GPUs. When one ends, vLLM waits up to 9 seconds for the others, which wait for it in a
collective operation; and when one cannot load the model, the error only says that there is an error in the log.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import re
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

REASONS = r"^\(Worker\S* pid=\d+\) .*\] [\w.]*(?:Error|Exception)\b"
"""Lines of vLLM's log with the error of a rank: `(Worker_TP1 pid=12) ERROR 11-27 10:00:00 [x.py:1] ValueError: ...`."""

_NAME = re.compile(r"VllmWorker-(\d+)")
_POLL_SECONDS = 0.1


class RankError(Exception):
    """A rank of vLLM has ended."""


class Ranks:
    """vLLM's ranks by number; there are none where vLLM runs in this process."""

    def __init__(self) -> None:
        self._processes: dict[int, BaseProcess] = {}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Watch the ranks that are started inside the block. Raises RankError if the block fails after one has ended.

        The first ranks that end are named: vLLM ends the others seconds later.
        """
        over, ended = threading.Event(), list[str]()

        def watch() -> None:
            while not ended and not over.wait(_POLL_SECONDS):
                self._find()
                ended.extend(self._ended())

        thread = threading.Thread(target=watch, name="rank-watch", daemon=True)
        thread.start()
        try:
            yield
            self._find()
        except Exception as error:
            if ended:
                raise RankError(f"{' and '.join(ended)} ended while the model was loaded") from error
            raise
        finally:
            over.set()
            thread.join()

    def check(self) -> None:
        """Raise RankError if a rank has ended. Runs in any thread."""
        if ended := self._ended():
            raise RankError(f"{' and '.join(ended)} ended")

    def _find(self) -> None:
        for process in multiprocessing.active_children():
            if (named := _NAME.fullmatch(process.name)) is not None:
                self._processes[int(named[1])] = process

    def _ended(self) -> list[str]:
        """Return the ranks that have ended, such as `rank 1 of vLLM (process 123)`.

        Asks the kernel without collecting the processes, which vLLM does in a thread of its own.
        """
        over = multiprocessing.connection.wait([each.sentinel for each in self._processes.values()], timeout=0)
        return [
            f"rank {number} of vLLM (process {process.pid})"
            for number, process in sorted(self._processes.items())
            if process.sentinel in over
        ]
