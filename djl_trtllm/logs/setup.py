"""Sets up the log of a command: one handler, on standard error."""

from __future__ import annotations

import logging
import sys

from rich.console import Console
from rich.logging import RichHandler

from djl_trtllm.logs.background import BackgroundHandler
from djl_trtllm.logs.context import mark
from djl_trtllm.logs.formats import JsonLines, TextFormatter


def configure(
    level: str, *, json: bool = False, console: Console | None = None, root: logging.Logger | None = None
) -> None:
    """Log lines of this level and above; a second call replaces what the first has set up.

    `console` is that of a command that also shows progress. A program that has set up its own log keeps it.
    """
    root = root or logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, BackgroundHandler)]
    if len(ours) < len(root.handlers):
        return
    for handler in ours:
        root.removeHandler(handler)
        handler.close()
    root.addHandler(BackgroundHandler(_handler(json=json, console=console)))
    root.setLevel(level.upper())


def mark_lines(root: logging.Logger | None = None) -> None:
    """In a program with a log of its own, whose lines are the messages: begin them with the id of their request."""
    for handler in (root or logging.getLogger()).handlers:
        if handler.formatter is None or handler.formatter._fmt == "%(message)s":
            handler.addFilter(_marked)
            handler.setFormatter(TextFormatter(short=True))


def _marked(record: logging.LogRecord) -> bool:
    mark(record)
    return True


def _handler(*, json: bool, console: Console | None) -> logging.Handler:
    if json or not sys.stderr.isatty():
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines() if json else TextFormatter())
        return handler
    handler = RichHandler(console=console or Console(stderr=True), show_path=False, rich_tracebacks=False)
    handler.setFormatter(TextFormatter(short=True))
    return handler
