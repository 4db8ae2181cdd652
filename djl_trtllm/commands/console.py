"""Console output of commands: errors and progress, both on standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console

from djl_trtllm.errors import DjlTrtllmError


@contextmanager
def errors_for_the_reader() -> Iterator[None]:
    """Print expected errors as a message and exit with status 1, without a traceback."""
    try:
        yield
    except DjlTrtllmError as error:
        Console(stderr=True, soft_wrap=True).print(f"[bold red]error:[/] {escaped(str(error))}", highlight=False)
        raise typer.Exit(1) from None


def escaped(text: str) -> str:
    return text.replace("[", "\\[")


def progress_printer() -> Callable[[str], None]:
    console = Console(stderr=True, soft_wrap=True)
    return lambda line: console.print(escaped(line), highlight=False)
