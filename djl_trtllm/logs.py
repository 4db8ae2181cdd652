"""The log: its two formats, the id of the request in each line, and the thread that writes it.

Code that runs for one request finds the request's id in a context variable. Code that runs for several at once, such as
the handler of the engine's output, gives it with the line: `logger.info(..., extra=of_request(identifier))`.

The formats are text, and a JSON object per line. Names, paths and ids in messages come from clients and files. In text,
a control character is shown by its escape, and what follows a line end is indented, so that no forged line begins like
one of the log. JSON escapes both. A thread writes, so that the code that logs never waits for a slow reader.
"""

import json
import logging
import queue
import re
import sys
import threading
import time
from contextvars import ContextVar
from functools import partial
from logging.handlers import QueueHandler
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter
from rich.console import Console
from rich.logging import RichHandler

_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_ATTRIBUTE = "request_id"
SHORT = "short_message"
"""The `extra` with a shorter message for JSON lines, which have the rest of it in their other fields."""


class RequestContext:
    """A block whose code, and the tasks that it starts, belong to this request."""

    __slots__ = ("_identifier", "_token")

    def __init__(self, identifier: str) -> None:
        self._identifier = identifier

    def __enter__(self) -> None:
        self._token = _REQUEST_ID.set(self._identifier)

    def __exit__(self, *_: object) -> None:
        _REQUEST_ID.reset(self._token)


def current_request_id() -> str:
    """The id of the request for which the code runs; "" if it runs for none."""
    return _REQUEST_ID.get()


def of_request(identifier: str) -> dict[str, str]:
    """The `extra` of a line that belongs to this request."""
    return {_ATTRIBUTE: identifier}


def mark(record: logging.LogRecord) -> None:
    """Keep with a line the id of the request for which it is made; call it where that runs."""
    if not hasattr(record, _ATTRIBUTE) and (identifier := current_request_id()):
        setattr(record, _ATTRIBUTE, identifier)


def request_id_of(record: logging.LogRecord) -> str:
    """The id of the request that a marked line belongs to; "" if it belongs to none."""
    return str(getattr(record, _ATTRIBUTE, ""))


_LINE_END = "\n"
_INDENTED = "\n  "
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line end, and those that reorder or break lines where text is shown."""


def printable(text: str) -> str:
    """The text with escapes for what cannot be printed; line ends stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class _Times(logging.Formatter):
    """Formats the times of lines. Lines of one second share the text of their time up to the second."""

    _second: int | None = None
    _until_second = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        if datefmt or not self.default_msec_format:
            return super().formatTime(record, datefmt)
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._until_second = time.strftime(self.default_time_format, self.converter(record.created))
        return self.default_msec_format % (self._until_second, record.msecs)


class TextFormatter(_Times):
    """`TIME LEVEL LOGGER: [REQUEST] MESSAGE`; further lines of a message, and tracebacks, are indented.

    `short`: the message only, for a terminal that shows the rest itself.
    """

    def __init__(self, *, short: bool = False) -> None:
        if short:
            super().__init__("%(message)s", datefmt="%X")
        else:
            super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if identifier := request_id_of(record):
            shown = {"asctime": getattr(record, "asctime", ""), "levelname": record.levelname, "name": record.name}
            # Other handlers may have the same record.
            return str(self._fmt) % {**shown, "message": f"[{identifier}] {record.message}"}
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace(_LINE_END, _INDENTED)


class JsonLines(_Times, JsonFormatter):
    """`time`, `level`, `logger`, `message`, `request_id` if the line belongs to a request, and its own fields."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "traceback"},
            # uvicorn gives its messages a second time, with colours.
            reserved_attrs=[*RESERVED_ATTRS, "color_message", SHORT],
            json_serializer=partial(json.dumps, separators=(",", ":")),
        )
        self.converter = time.gmtime

    def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any], /) -> None:
        super().add_fields(log_data, record, message_dict)
        if hasattr(record, SHORT):
            log_data["message"] = getattr(record, SHORT)
            del log_data["logger"]


_MOST_WAITING = 10_000
"""Lines that wait to be written; more are dropped and counted."""
_MOST_TOGETHER = 100
"""Lines that are written at once."""
_TOGETHER_SECONDS = 0.05
"""How long a line waits for more, if lines were written just before: waking the thread for each line takes longer than
writing it. A line after a pause is written at once, before the process continues and perhaps ends."""
_LAST_SECONDS = 2.0
"""How long the end of the process waits for its last lines to be read."""

logger = logging.getLogger(__name__)


class BackgroundHandler(QueueHandler):
    """Passes lines on to `target` in a thread of its own, at most `most` of them waiting.

    That thread takes no lock of `target`: where nobody reads, it would hold it while the process ends, and
    `logging.shutdown` waits for the locks of all handlers.
    """

    def __init__(self, target: logging.Handler, most: int = _MOST_WAITING) -> None:
        self._lines: queue.SimpleQueue[logging.LogRecord | None] = queue.SimpleQueue()
        super().__init__(self._lines)
        self._most = most
        self._target = target
        self._dropped = 0
        """Only threads that log change it, so that the writing thread needs no lock to read it."""
        self._quiet_from = 0.0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        if hasattr(record, _ATTRIBUTE) and type(record.msg) is str and not (record.args or record.exc_info):
            return record  # it refers to nothing of the request
        given, record = record, logging.LogRecord.__new__(type(record))  # copy.copy takes ten times as long
        vars(record).update(vars(given))
        mark(record)
        record.msg, record.args = record.getMessage(), None
        if record.exc_info:
            # The exception holds its frames, and with them what the request held.
            record.exc_text = record.exc_text or logging.Formatter().formatException(record.exc_info)
            record.exc_info = None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() < self._most:
            self._lines.put(record)
        else:
            self._dropped += 1

    def close(self) -> None:
        """Write the waiting lines, if a reader takes them."""
        self._lines.put(None)
        super().close()
        self._thread.join(_LAST_SECONDS)

    def _next(self) -> logging.LogRecord | None:
        """The next line; None at the end."""
        if not self._lines.empty():
            return self._lines.get()
        first = self._lines.get()
        if first is not None and time.monotonic() < self._quiet_from:
            time.sleep(_TOGETHER_SECONDS)
        self._quiet_from = time.monotonic() + _TOGETHER_SECONDS
        return first

    def _write(self) -> None:
        reported = 0
        while (record := self._next()) is not None:
            self._target.emit(record)
            dropped = self._dropped - reported
            if dropped:
                reported += dropped
                text = "%d lines were dropped: the log is read more slowly than it is written"
                self._target.emit(logger.makeRecord(logger.name, logging.WARNING, "", 0, text, (dropped,), None))
            if self._lines.empty():
                self._target.flush()
        self._target.flush()


class Lines(logging.StreamHandler):  # type: ignore[type-arg]  # subscripts need Python 3.11
    """Collects lines, and writes them at `flush` or when they are many: each write is a system call."""

    def __init__(self) -> None:
        self._unwritten: list[str] = []
        super().__init__()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._unwritten.append(self.format(record) + self.terminator)
        except Exception:
            self.handleError(record)
        if len(self._unwritten) >= _MOST_TOGETHER:
            self.flush()

    def flush(self) -> None:
        unwritten, self._unwritten = self._unwritten, []
        if not unwritten:
            return
        try:
            self.stream.write("".join(unwritten))
            self.stream.flush()
        except Exception:  # a full disk: the thread that writes goes on, and so do later lines
            text, lost = "%d lines of the log could not be written", (len(unwritten),)
            self.handleError(logger.makeRecord(logger.name, logging.ERROR, "", 0, text, lost, None))


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
    # Neither format has them, and to find them out takes longer than all else of a line.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    root.addHandler(BackgroundHandler(_handler(json=json, console=console)))
    root.setLevel(level.upper())


def mark_lines(root: logging.Logger | None = None) -> None:
    """Begin lines with the id of their request, in a program with a log of its own whose lines are the messages."""
    for handler in (root or logging.getLogger()).handlers:
        if handler.formatter is None or handler.formatter._fmt == "%(message)s":
            handler.addFilter(_marked)
            handler.setFormatter(TextFormatter(short=True))


def _marked(record: logging.LogRecord) -> bool:
    mark(record)
    return True


def _handler(*, json: bool, console: Console | None) -> logging.Handler:
    if json or not sys.stderr.isatty():
        handler: logging.Handler = Lines()
        handler.setFormatter(JsonLines() if json else TextFormatter())
        return handler
    handler = RichHandler(console=console or Console(stderr=True), show_path=False, rich_tracebacks=False)
    handler.setFormatter(TextFormatter(short=True))
    return handler


__all__ = ["RequestContext", "configure", "current_request_id", "mark_lines", "of_request"]
