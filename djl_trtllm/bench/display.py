"""What runs now: a line that is kept up to date on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from djl_trtllm.bench.load import Progress
from djl_trtllm.bench.report import number, seconds

_LINE_SECONDS = 10.0


class Display:
    """Shows progress on standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._said = 0.0
        self._load: object = None

    def say(self, line: str) -> None:
        """Print a line of its own."""
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def show(self, progress: Progress) -> None:
        """Called some times a second."""
        line = describe(progress)
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(escape(line))
                self._status.start()
            self._status.update(escape(line))
        elif progress.load is not self._load or time.monotonic() - self._said >= _LINE_SECONDS:
            self.say(line)
            self._said = time.monotonic()
        self._load = progress.load

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def describe(progress: Progress) -> str:
    """One line."""
    figures = progress.figures
    parts = [
        f"{progress.load.label}: {progress.phase} {max(0.0, progress.since):.0f} s",
        f"{progress.in_flight} in flight",
        f"{figures.succeeded:,} done",
        f"{number(progress.tokens_per_second)} tok/s",
    ]
    if figures.ttft.count:
        parts.append(f"TTFT p50 {seconds(figures.ttft.percentile(0.5))}")
    if figures.failed:
        parts.append(f"{figures.failed:,} failed")
    return ", ".join(parts)
