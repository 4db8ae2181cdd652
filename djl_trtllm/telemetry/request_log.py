"""The line of the log that each request has at its end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from djl_trtllm.config.masking import shortened
from djl_trtllm.logs import of_request
from djl_trtllm.telemetry.served_request import LONGEST, ServedRequest

logger = logging.getLogger("djl_trtllm.requests")

_MOST_LINES = 10
_SECONDS = 1.0
"""Requests that never generated have this number of lines in this time; a flood of refusals is a number."""
_BARE = re.compile(r"[^\s\"=]+")


class RequestLog:
    """Writes the lines, on an event loop.

    Those of requests that generated are as many as the engine can serve. Of the others there are a few each second,
    and a line with the number of those that have none. Health checks, and pages that were read, are for the level
    DEBUG.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window = float("-inf")
        self._lines = 0
        self._unwritten: Counter[str] = Counter()

    def write(self, request: ServedRequest, fields: dict[str, Any]) -> None:
        """Write the line of a request that has ended now; `fields` are added to it."""
        level = logging.DEBUG if request.quiet or (request.reads and not request.failed) else logging.INFO
        if not logger.isEnabledFor(level):
            return
        if not request.generations and level > logging.DEBUG and not self._has_room(str(request.status)):
            return
        fields = {**_fields(request, self._clock()), **fields}
        head = (_shown(fields[name]) for name in _HEAD)
        text = " ".join([*head, *(f"{name}={_shown(value)}" for name, value in fields.items() if name not in _HEAD)])
        logger.log(level, "%s", text, extra={**_belonging(request), **fields})

    def _has_room(self, status: str) -> bool:
        now = self._clock()
        if now - self._window >= _SECONDS:
            self._window, self._lines = now, 0
        self._lines += 1
        if self._lines <= _MOST_LINES:
            return True
        if not self._unwritten:
            asyncio.get_running_loop().call_later(_SECONDS, self.flush)
        self._unwritten[status] += 1
        return False

    def flush(self) -> None:
        """Write the number of requests that have no line, if there are any."""
        unwritten, self._unwritten = self._unwritten, Counter()
        if not unwritten:
            return
        statuses = ", ".join(f"{number} with {status}" for status, number in sorted(unwritten.items()))
        text = "%d more requests did not generate and have no line: %s"
        logger.info(text, unwritten.total(), statuses, extra={"unwritten": dict(unwritten)})


_HEAD = ("method", "path", "status")


def _fields(request: ServedRequest, now: float) -> dict[str, Any]:
    """What the line says, by the names that it has in JSON."""
    fields: dict[str, Any] = {
        "method": shortened(request.method, LONGEST),
        "path": shortened(request.path, LONGEST),
        "status": request.status,
    }
    generated = request.generated()
    error = request.error or ("" if generated is None else generated.error)
    named = {"model": request.model, "dialect": request.dialect, "error": error}
    fields |= {name: shortened(value, LONGEST) for name, value in named.items() if value}
    if generated is not None:
        fields["prompt_tokens"] = generated.prompt_tokens
        fields["output_tokens"] = generated.output_tokens
        if generated.started is not None:
            fields["queue_seconds"] = round(generated.started - generated.queued, 4)
        if generated.first_token is not None:
            fields["ttft_seconds"] = round(generated.first_token - request.began, 4)
        fields["finish_reason"] = ",".join(generated.reasons)
    fields["total_seconds"] = round(now - request.began, 4)
    return fields


def _belonging(request: ServedRequest) -> dict[str, str]:
    return of_request(request.id) if request.id else {}


def _shown(value: Any) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)
