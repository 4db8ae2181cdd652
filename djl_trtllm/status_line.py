"""What runs now: a line that is kept up to date on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape
from rich.status import Status

_LINE_SECONDS = 10.0


class StatusLine:
    """Shows on a console what runs now."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status: Status | None = None
        self._said = 0.0
        self._work: object = None

    def say(self, line: str) -> None:
        """Print a line of its own."""
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def show(self, line: str, work: object) -> None:
        """Called some times a second; other `work` than before has a line in a log at once."""
        if self._console.is_terminal:
            if self._status is None:
                self._status = self._console.status(escape(line))
                self._status.start()
            self._status.update(escape(line))
        elif work != self._work or time.monotonic() - self._said >= _LINE_SECONDS:
            self.say(line)
            self._said = time.monotonic()
        self._work = work

    def stop(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
