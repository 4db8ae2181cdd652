"""How commands talk: errors for the reader, progress on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from djl_trtllm.errors import DjlTrtllmError


@contextmanager
def errors_for_the_reader() -> Iterator[None]:
    """Expected errors are a message and exit status 1, not a traceback."""
    try:
        yield
    except DjlTrtllmError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escaped(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def escaped(text: str) -> str:
    """Text with nothing in it that rich takes for markup."""
    return text.replace("[", "\\[")


def progress_printer() -> Callable[[str], None]:
    """Prints a line of progress on standard error."""
    console = Console(stderr=True, soft_wrap=True)
    return lambda line: console.print(escaped(line), highlight=False)
