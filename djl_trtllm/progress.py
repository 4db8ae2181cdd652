"""Progress of long work: lines that are kept up to date on a terminal, a line every ten seconds in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from filelock import FileLock
    from rich.console import Console
    from rich.table import Table

_LINE_SECONDS = 10.0
_RATE_OVER_SECONDS = 10.0
_TICK_SECONDS = 0.5
_FIRST_WAIT_SECONDS = 0.5
_NEXT_WAITS_SECONDS = 10.0


class Display(Protocol):
    """Shows the work that is under way; called from any thread."""

    def show(self, work: str, line: str, *, phase: object = None, done: float = 0, total: float = 0) -> None:
        """Show `line`, the state of this work. A log gets a line at once when the phase changes."""

    def end(self, work: str) -> None:
        """Remove this work, which has ended."""

    def say(self, line: str) -> None:
        """Print a line that stays."""


class LogDisplay:
    """Writes a line when a work enters a phase (not None), and every ten seconds."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._said: dict[str, tuple[object, float]] = {}

    def show(self, work: str, line: str, *, phase: object = None, done: float = 0, total: float = 0) -> None:
        now = time.monotonic()
        before, at = self._said.setdefault(work, (None, now))
        if phase != before or now - at >= _LINE_SECONDS:
            self._said[work] = phase, now
            self.say(line)

    def end(self, work: str) -> None:
        self._said.pop(work, None)


class TerminalDisplay:
    """Keeps a line on a terminal for each work, with a bar if it has a total; the line is gone when the work ends."""

    def __init__(self, console: Console) -> None:
        # Importing these takes some 10 ms, which pipes and --help do without.
        from rich.live import Live
        from rich.spinner import Spinner

        self._console = console
        self._spinner = Spinner("dots")
        self._works: dict[str, tuple[str, float, float]] = {}
        self._live = Live(console=console, get_renderable=self._lines, transient=True, refresh_per_second=8)
        self._lock = threading.RLock()

    def show(self, work: str, line: str, *, phase: object = None, done: float = 0, total: float = 0) -> None:
        with self._lock:
            self._works[work] = line, done, total
            self._live.start()

    def end(self, work: str) -> None:
        with self._lock:
            if list(self._works) == [work]:
                self._live.stop()
            self._works.pop(work, None)

    def say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def _lines(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        table = Table.grid(padding=(0, 1))
        for line, done, total in list(self._works.values()):
            bar = (ProgressBar(total, done, width=30),) if total else ()
            table.add_row(self._spinner, Text(line), *bar)
        return table


def display_on(console: Console) -> Display:
    """Return the display for this console, a terminal or a log. All work of a command shares one of a terminal."""
    if console.is_terminal:
        return _displays[-1] if _displays else TerminalDisplay(console)
    return LogDisplay(lambda line: console.print(line, soft_wrap=True, markup=False, highlight=False))


_displays: list[Display] = []


@contextmanager
def shown_on(display: Display) -> Iterator[None]:
    """Show all progress of this process on `display`, in place of lines in the log."""
    _displays.append(display)
    try:
        yield
    finally:
        _displays.remove(display)


@contextmanager
def kept_up_to_date(
    display: Display, work: str, line: Callable[[], str], size: Callable[[], tuple[float, float]]
) -> Iterator[None]:
    """Show `line()` twice a second while the block runs; `size()` is what is done and the total."""
    over = threading.Event()

    def keep() -> None:
        while not over.is_set():
            done, total = size()
            display.show(work, line(), done=done, total=total)
            over.wait(_TICK_SECONDS)

    thread = threading.Thread(target=keep, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        display.end(work)


@contextmanager
def under_way(work: str) -> Iterator[None]:
    """Show how long the block takes, where there is a terminal."""
    if not _displays:
        yield
        return
    started = time.monotonic()
    with kept_up_to_date(_displays[-1], work, lambda: f"{work}, {time.monotonic() - started:.0f} s", lambda: (0, 0)):
        yield


@contextmanager
def batch_progress(total: int, generated: Callable[[], int], console: Console) -> Iterator[Callable[[], None]]:
    """Show how many of `total` prompts are done, and tokens per second; yield what is to be called for each prompt.

    `generated` returns the number of tokens so far.
    """
    started, before, done = time.monotonic(), generated(), 0

    def advance() -> None:
        nonlocal done
        done += 1

    def line() -> str:
        seconds = max(time.monotonic() - started, 1e-3)
        return f"{done} of {total} prompts, {(generated() - before) / seconds:,.0f} tokens/s"

    with kept_up_to_date(display_on(console), "prompts", line, lambda: (done, total)):
        yield advance


class ProgressMeter:
    """Counts bytes from any thread and shows their amount, the rate and the time left.

    As a context manager it writes a last line about the whole, unless an error ends it. `progress` gets the lines.
    """

    def __init__(self, work: str, total: int, progress: Callable[[str], None]) -> None:
        self.done = 0
        self._work = work
        self._total = total
        self._progress = progress
        self._display = _displays[-1] if _displays else LogDisplay(progress)
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._windows = ((self._started, 0), (self._started, 0))
        self._show()

    def add(self, count: int) -> None:
        """Add `count` bytes; negative when a piece has to be fetched again."""
        with self._lock:
            self.done += count
            self._show()

    def __enter__(self) -> ProgressMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._display.end(self._work)
        if kind is None:
            seconds = max(time.monotonic() - self._started, 1e-3)
            self._progress(
                f"{self._work}: {format_bytes(self.done)} in {seconds:.1f} s ({format_bytes(self.done / seconds)}/s)"
            )

    def _show(self) -> None:
        now = time.monotonic()
        older, newer = self._windows
        if now - newer[0] > _RATE_OVER_SECONDS:
            older, newer = self._windows = newer, (now, self.done)
        rate = (self.done - older[1]) / max(now - older[0], 1e-3)
        left = f", {(self._total - self.done) / rate:.0f} s left" if rate > 0 else ""
        amount = f"{format_bytes(self.done)} of {format_bytes(self._total)}"
        line = f"{self._work}: {amount}, {format_bytes(rate)}/s{left}"
        self._display.show(self._work, line, done=self.done, total=self._total)


def acquire(lock: FileLock, report: Callable[[float], None]) -> AbstractContextManager[object]:
    """Acquire the lock of a file. While another process holds it, `report` gets the seconds waited so far."""
    from filelock import Timeout  # imports asyncio, which --help does without

    started = time.monotonic()
    wait = _FIRST_WAIT_SECONDS
    while True:
        try:
            return lock.acquire(timeout=wait)
        except Timeout:
            report(time.monotonic() - started)
            wait = _NEXT_WAITS_SECONDS


def format_bytes(count: float) -> str:
    """Return bytes for a reader: `1.5 GB`, powers of 1000."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"
