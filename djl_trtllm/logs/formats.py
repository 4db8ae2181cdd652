"""The two formats of the log: text, and a JSON object per line.

Names, paths and ids in messages come from clients and files. In text, a control character is shown by its escape, and
what follows a line end is indented, so that no line begins like one of the log that is not one. JSON escapes both.
"""

from __future__ import annotations

import logging
import re
import time

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

from djl_trtllm.logs.context import request_id_of

_LINE_END = "\n"
_INDENTED = "\n  "
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line end, and those that reorder or break lines where text is shown."""


def printable(text: str) -> str:
    """The text with escapes for what cannot be printed; line ends stay."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class TextFormatter(logging.Formatter):
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
            record.message = f"[{identifier}] {record.message}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace(_LINE_END, _INDENTED)


class JsonLines(JsonFormatter):
    """`time`, `level`, `logger`, `message`, `request_id` if the line belongs to a request, and its own fields."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s %(levelname)s %(name)s %(message)s",
            rename_fields={"asctime": "time", "levelname": "level", "name": "logger", "exc_info": "traceback"},
            # uvicorn gives its messages a second time, with colours.
            reserved_attrs=[*RESERVED_ATTRS, "color_message"],
        )
        self.converter = time.gmtime
