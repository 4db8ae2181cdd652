"""Console output of commands; errors and progress are on standard error.

A terminal gets lines that are wrapped between words, a pipe or a file gets each message in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from djl_trtllm.commands.bars import bars_on
from djl_trtllm.config.listing import wrapped
from djl_trtllm.errors import DjlTrtllmError


@contextmanager
def errors_for_the_reader() -> Iterator[None]:
    """Print expected errors as a message and exit with status 1, without a traceback; on a terminal, show bars."""
    try:
        with bars_on(Console(stderr=True)):
            yield
    except DjlTrtllmError as error:
        say(Console(stderr=True), str(error), label="error:", style="bold red")
        raise typer.Exit(1) from None


def width_of(console: Console) -> int | None:
    """The width at which lines are wrapped; None: they are not."""
    return console.width if console.is_terminal else None


def show(console: Console, text: Text) -> None:
    """Print text whose lines have their length already."""
    console.print(text, soft_wrap=True)


def say(console: Console, text: str, *, label: str = "", style: str = "") -> None:
    """Print a message after a label that stands out."""
    line = Text(wrapped(f"{label} {text}" if label else text, width_of(console), indent="  " if label else ""))
    line.stylize(style, 0, len(label))
    show(console, line)


def progress_printer() -> Callable[[str], None]:
    console = Console(stderr=True)
    return lambda line: say(console, line)
