"""Writes the log in a thread, so that what logs never waits for who reads it."""

from __future__ import annotations

import copy
import logging
import queue
import threading
from logging.handlers import QueueHandler

from djl_trtllm.logs.context import mark

_MOST_WAITING = 10_000
"""Lines that wait to be written; more are dropped and counted."""
_LAST_SECONDS = 2.0
"""How long the end of the process waits for its last lines to be read."""

logger = logging.getLogger(__name__)


class BackgroundHandler(QueueHandler):
    """Passes lines on to `target` in a thread of its own, at most `most` of them waiting."""

    def __init__(self, target: logging.Handler, most: int = _MOST_WAITING) -> None:
        self._lines: queue.Queue[logging.LogRecord | None] = queue.Queue(most)
        super().__init__(self._lines)
        self._target = target
        self._dropped = 0
        """Counted by who logs only, so that the writing thread needs no lock to read it."""
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        record = copy.copy(record)
        mark(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            # The exception holds its frames, and with them what the request held.
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Write what waits, if somebody reads it."""
        try:
            self._lines.put(None, timeout=_LAST_SECONDS)
        except queue.Full:
            return
        finally:
            super().close()
        self._thread.join(_LAST_SECONDS)

    def _write(self) -> None:
        told = 0
        while (record := self._lines.get()) is not None:
            self._target.handle(record)
            dropped = self._dropped - told
            if dropped:
                told += dropped
                text = "%d lines were dropped: the log is read more slowly than it is written"
                self._target.handle(logger.makeRecord(logger.name, logging.WARNING, "", 0, text, (dropped,), None))
