"""The processes that an engine's library starts by multiprocessing from the engine process: ranks of one model.

A library may notice late that one has ended: vLLM waits up to 9 seconds for the others, which wait for it in a
collective operation. And when one cannot load the model, the error only says that there is an error in the log.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import re
import threading
from collections.abc import Iterator
from multiprocessing.process import BaseProcess

_POLL_SECONDS = 0.1


class RankError(Exception):
    """A rank of the model has ended."""


class Ranks:
    """The ranks of `engine` by number; there are none where the engine runs in this process.

    `name` is a regular expression: the names of their processes, with the rank's number as its group.
    """

    def __init__(self, engine: str, name: str) -> None:
        self._engine = engine
        self._name = re.compile(name)
        self._processes: dict[int, BaseProcess] = {}

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Watch the ranks that are started inside the block. Raises RankError if the block fails after one has ended.

        The first ranks that end are named: the library may end the others seconds later.
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
            if (named := self._name.fullmatch(process.name)) is not None:
                self._processes[int(named[1])] = process

    def _ended(self) -> list[str]:
        """Return the ranks that have ended, such as `rank 1 of vLLM (process 123)`.

        Asks the kernel without collecting the processes, which the library may do in a thread of its own.
        """
        over = multiprocessing.connection.wait([each.sentinel for each in self._processes.values()], timeout=0)
        return [
            f"rank {number} of {self._engine} (process {process.pid})"
            for number, process in sorted(self._processes.items())
            if process.sentinel in over
        ]
