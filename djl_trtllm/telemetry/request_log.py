"""A request and its response as the front end saw them, and their line in the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from djl_trtllm.batching.sequence import RequestState
from djl_trtllm.config.masking import shortened
from djl_trtllm.logs import of_request
from djl_trtllm.request import FINISH_WORDS, GenerationRequest

LONGEST = 200
"""Characters of a path or a name in a line or a trace: clients may name a model with a megabyte."""

CLIENT_LEFT = 499
"""The status of a request whose client left before there was a response; nginx has given it this number."""


class Generated(NamedTuple):
    """What the engine did for a request; several prompts count from the first start to the last end.

    Times are those of `time.monotonic`, None for what did not happen. `reasons` are LMI's, as in the metrics.
    """

    prompt_tokens: int
    output_tokens: int
    queued: float
    started: float | None
    first_token: float | None
    last_token: float | None
    reasons: tuple[str, ...]
    error: str
    resumes: int = 0
    reseeded: bool = False


class Asked(NamedTuple):
    """The parameters of a request (of its first prompt), named as in the conventions for traces."""

    operation: str
    max_tokens: int
    temperature: float
    top_p: float
    n: int

    @classmethod
    def of(cls, request: GenerationRequest) -> Asked:
        sampling = request.sampling
        operation = "text_completion" if request.messages is None else "chat"
        most = sampling.max_new_tokens or request.default_new_tokens
        temperature = sampling.temperature if sampling.do_sample else 0.0
        return cls(operation, most, temperature, sampling.top_p, sampling.n)


@dataclass(slots=True, eq=False)
class ServedRequest:
    """What is known of a request at its end; the front end fills it in while the request runs.

    `method` and `path` are HTTP's, or what stands for them. `status` is HTTP's, or gRPC's by name. `error` is the class
    of what went wrong: messages may quote the text of a request. `headers` (lower case) may have the context of a
    trace. `reads`: it changes nothing and generates nothing. `quiet`: it has no line even where it fails, as a health
    check does while a model is loading. `client` is the name of its API key, or a hash of what names it.
    """

    id: str
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    dialect: str = ""
    model: str = ""
    client: str = ""
    status: int | str = CLIENT_LEFT
    error: str = ""
    reads: bool = False
    quiet: bool = False
    asked: Asked | None = None
    generations: Sequence[RequestState] = ()
    began: float = field(default_factory=time.monotonic)

    @property
    def failed(self) -> bool:
        return self.status >= 400 if isinstance(self.status, int) else self.status != "OK"

    def generated(self) -> Generated | None:
        """Return what the engine did; None if the request never was in the waiting queue."""
        records = [state.record for state in self.generations]
        if not records:
            return None
        return Generated(
            sum([record.prompt_tokens for record in records]),
            sum([record.generated_tokens for record in records]),
            min([record.arrived for record in records]),
            min([record.started for record in records if record.started is not None], default=None),
            min([record.first_token_at for record in records if record.first_token_at is not None], default=None),
            max([record.last_token_at for record in records if record.last_token_at is not None], default=None),
            tuple(dict.fromkeys([FINISH_WORDS[record.reason] for record in records if record.reason is not None])),
            next((record.error for record in records if record.error), ""),
            sum([record.resumes for record in records]),
            any(record.reseeded for record in records),
        )


logger = logging.getLogger("djl_trtllm.requests")

_MOST_LINES = 10
_SECONDS = 1.0
"""Requests that never generated have at most `_MOST_LINES` lines in this time; the others are counted."""
_BARE = re.compile(r"[^\s\"=]+")


class RequestLog:
    """Writes the lines, on an event loop.

    Each request that generated has a line. Other requests have at most 10 lines a second, and then one line with the
    number of requests without a line, and with the client that sent most of them. Health checks, and pages that were
    read, are for the level DEBUG.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._window = float("-inf")
        self._lines = 0
        self._unwritten: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    def write(self, request: ServedRequest, fields: dict[str, Any]) -> None:
        """Write the line of a request that has ended now; `fields` are added to it."""
        level = logging.DEBUG if request.quiet or (request.reads and not request.failed) else logging.INFO
        if not logger.isEnabledFor(level):
            return
        if not request.generations and level > logging.DEBUG and not self._has_room(request):
            return
        fields = {**_fields(request, self._clock()), **fields}
        shown = [_shown(value) if name in _HEAD else f"{name}={_shown(value)}" for name, value in fields.items()]
        # As `logger.log` does it, which would look for the file and line where it is called.
        extra = {**_belonging(request), **fields}
        logger.handle(logger.makeRecord(logger.name, level, "", 0, " ".join(shown), (), None, extra=extra))

    def _has_room(self, request: ServedRequest) -> bool:
        now = self._clock()
        if now - self._window >= _SECONDS:
            self._window, self._lines = now, 0
        self._lines += 1
        if self._lines <= _MOST_LINES:
            return True
        if not self._unwritten:
            asyncio.get_running_loop().call_later(_SECONDS, self.flush)
        self._unwritten[str(request.status)] += 1
        self._refused[request.client] += 1
        return False

    def flush(self) -> None:
        """Write the number of requests that have no line, if there are any."""
        unwritten, self._unwritten = self._unwritten, Counter()
        refused, self._refused = self._refused, Counter()
        if not unwritten:
            return
        statuses = ", ".join(f"{number} with {status}" for status, number in sorted(unwritten.items()))
        ((client, most),) = refused.most_common(1)
        busiest = f"; {most} of client={_shown(shortened(client, LONGEST))}" if client else ""
        text = "%d more requests did not generate and have no line: %s%s"
        logger.info(text, unwritten.total(), statuses, busiest, extra={"unwritten": dict(unwritten)})


_HEAD = ("method", "path", "status")


def _fields(request: ServedRequest, now: float) -> dict[str, Any]:
    """Return the fields of the line, by their names in JSON."""
    fields: dict[str, Any] = {
        "method": shortened(request.method, LONGEST),
        "path": shortened(request.path, LONGEST),
        "status": request.status,
    }
    generated = request.generated()
    error = request.error or ("" if generated is None else generated.error)
    named = {"model": request.model, "dialect": request.dialect, "client": request.client, "error": error}
    fields |= {name: shortened(value, LONGEST) for name, value in named.items() if value}
    if generated is not None:
        fields["prompt_tokens"] = generated.prompt_tokens
        fields["output_tokens"] = generated.output_tokens
        if generated.started is not None:
            fields["queue_seconds"] = round(generated.started - generated.queued, 4)
        if generated.first_token is not None:
            fields["ttft_seconds"] = round(generated.first_token - request.began, 4)
        fields["finish_reason"] = ",".join(generated.reasons)
        if generated.resumes:
            fields |= {"resumes": generated.resumes, "reseeded": generated.reseeded}
    fields["total_seconds"] = round(now - request.began, 4)
    return fields


def _belonging(request: ServedRequest) -> dict[str, str]:
    return of_request(request.id) if request.id else {}


def _shown(value: Any) -> str:
    text = str(value)
    return text if type(value) is not str or _BARE.fullmatch(text) else json.dumps(text)
