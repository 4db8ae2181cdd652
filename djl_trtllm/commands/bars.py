"""Bars on a terminal for what takes long; elsewhere the same work has lines now and then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from djl_trtllm.model.remote.progress import shown_on


class _WhereSized(ProgressColumn):
    """A column of bytes: empty for work without a size."""

    def __init__(self, column: ProgressColumn) -> None:
        self._column = column
        super().__init__()

    def render(self, task: Task) -> Text:
        shown = Text() if task.total is None else self._column.render(task)
        return shown if isinstance(shown, Text) else Text(str(shown))


class Bars:
    """A bar for each work that is under way; its line is gone when it has ended."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            _WhereSized(DownloadColumn()),
            _WhereSized(TransferSpeedColumn()),
            TimeElapsedColumn(),
            _WhereSized(TimeRemainingColumn()),
            console=console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._lock = threading.Lock()

    def show(self, what: str, done: int, total: int) -> None:
        """See `Display`."""
        with self._lock:
            if what not in self._tasks:
                self._tasks[what] = self._progress.add_task(escape(what), total=total or None)
                self._progress.start()
            self._progress.update(self._tasks[what], completed=done)

    def end(self, what: str) -> None:
        """See `Display`."""
        with self._lock:
            if (task := self._tasks.pop(what, None)) is not None:
                self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()


@contextmanager
def bars_on(console: Console) -> Iterator[None]:
    """Show progress on this console, a terminal."""
    with shown_on(Bars(console)):
        yield
