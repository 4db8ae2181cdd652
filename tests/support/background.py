"""A thread that runs during a block."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

from typing_extensions import Self


class InBackground(ABC):
    """Runs `_run` in a thread from the beginning of the block; `_end` is set at the end of it."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    @abstractmethod
    def _run(self) -> None: ...

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._end.set()
        self._thread.join()
