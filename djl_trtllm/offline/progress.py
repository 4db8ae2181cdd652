"""How far a batch is: a bar where a person looks at it, and a line now and then in a log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

_LOG_SECONDS = 10.0


@contextmanager
def batch_progress(
    total: int, generated: Callable[[], int], console: Console, *, log_seconds: float = _LOG_SECONDS
) -> Iterator[Callable[[], None]]:
    """Shows how many of `total` prompts are done and tokens per second; yields what is to be called for each prompt.

    `generated` returns the number of tokens so far. Where the console is no terminal there is no bar, but a line
    every `log_seconds`.
    """
    speed = _Speed(generated)
    if console.is_terminal:
        columns = (TextColumn("prompts"), MofNCompleteColumn(), BarColumn(), speed, TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
        return

    done = 0
    over = threading.Event()

    def advance() -> None:
        nonlocal done
        done += 1

    def log() -> None:
        while not over.wait(log_seconds):
            console.print(f"{done} of {total} prompts, {speed.text}", highlight=False)

    logging = threading.Thread(target=log, name="progress", daemon=True)
    logging.start()
    try:
        yield advance
    finally:
        over.set()
        logging.join()


class _Speed(ProgressColumn):
    """Tokens per second since it was made."""

    def __init__(self, generated: Callable[[], int]) -> None:
        super().__init__()
        self._generated = generated
        self._begun, self._before = time.monotonic(), generated()

    @property
    def text(self) -> str:
        seconds = max(time.monotonic() - self._begun, 1e-3)
        return f"{(self._generated() - self._before) / seconds:,.0f} tokens/s"

    def render(self, task: Task) -> Text:
        return Text(self.text)
