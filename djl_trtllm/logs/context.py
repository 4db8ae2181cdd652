"""The id of the request that a line of the log belongs to.

Code that runs for one request finds it in a context variable. Code that runs for several at once, such as what handles
the engine's output, gives it with the line: `logger.info(..., extra=of_request(identifier))`.
"""

from __future__ import annotations

import logging
from contextvars import ContextVar

_REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
_ATTRIBUTE = "request_id"


class RequestContext:
    """What runs inside belongs to this request, and so do tasks that are started inside."""

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
