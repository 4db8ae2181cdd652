"""Console output of commands; errors and progress are on standard error.

A terminal gets lines that are wrapped between words, a pipe or a file gets each message in one line.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import typer
from rich.console import Console
from rich.text import Text

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.listing import wrapped

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


@contextmanager
def errors_for_the_reader() -> Iterator[None]:
    """Print expected errors as a message and exit with status 1, without a traceback; on a terminal, show bars."""
    console = Console(stderr=True)
    try:
        with _bars_on(console) if console.is_terminal else nullcontext():
            yield
    except DjlTrtllmError as error:
        say(console, str(error), label="error:", style="bold red")
        raise typer.Exit(1) from None


def _bars_on(console: Console) -> AbstractContextManager[None]:
    # Their import takes some 10 ms, which pipes and --help do without.
    from djl_trtllm.commands.bars import bars_on

    return bars_on(console)


@contextmanager
def errors_of_stdout() -> Iterator[None]:
    """For all of a command: write what is buffered, and exit with status 1 and a message if stdout takes no more."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads it any more, which needs no message.
        drop_stdout()
        sys.exit(1)
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        drop_stdout()
        say(Console(stderr=True), f"cannot write the output: {error.strerror}", label="error:", style="bold red")
        sys.exit(1)


def drop_stdout() -> None:
    """Write what follows nowhere, so that what is buffered does not fail once more when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
