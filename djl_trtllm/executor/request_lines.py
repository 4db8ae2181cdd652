"""Which request a line belongs to that the engine process prints.

What the engine process prints while it handles one request is marked with the request's id, and the server takes the
mark off again for its log. Only what Python prints is marked: a library in C++ prints for one iteration, which serves
many requests.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TextIO, cast

_REQUEST: ContextVar[str] = ContextVar("request", default="")
_MARK = "\x1e"
_MARKED = re.compile(rf'{_MARK}("(?:[^"\\]|\\.)*"){_MARK}(.*)', re.DOTALL)


@contextlib.contextmanager
def printing_for(request: str) -> Iterator[None]:
    """What is printed inside, and in tasks that are started inside, belongs to the request with this id."""
    token = _REQUEST.set(request)
    try:
        yield
    finally:
        _REQUEST.reset(token)


class MarkedOutput:
    """Standard output or standard error, with marks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_line_start = True

    def write(self, text: str) -> int:
        """Write, with a mark before each line that begins here and belongs to a request."""
        request = _REQUEST.get()
        mark = f"{_MARK}{json.dumps(request)}{_MARK}" if request else ""
        inside = text.count("\n") - text.endswith("\n")
        begin = mark if self._at_line_start else ""
        if text:
            self._stream.write(begin + text.replace("\n", "\n" + mark, inside))
            self._at_line_start = text.endswith("\n")
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def mark_output() -> None:
    """Mark what this process prints from now on."""
    sys.stdout, sys.stderr = (cast(TextIO, MarkedOutput(stream)) for stream in (sys.stdout, sys.stderr))


def split_mark(line: str) -> tuple[str, str]:
    """The id of the request that a printed line belongs to, "" if to none, and the line without its mark."""
    if found := _MARKED.fullmatch(line):
        with contextlib.suppress(ValueError):
            return json.loads(found[1]), found[2]
    return "", line
