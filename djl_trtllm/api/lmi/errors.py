"""What every error becomes for an LMI client: one table, class to status and body.

Errors of a request's own making have the handler's body, `{"error", "code"}`; those of the server's state have the
front end's, `{"code", "type", "message"}`, with DJL's exception names as types. The statuses are DJL's, odd ones
included (424 for bad input, 400 for a timeout), and can be changed by the options DJL has for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import orjson

from djl_trtllm.api import Reply
from djl_trtllm.errors import (
    GenerationError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
)

_JSON = "application/json"


@dataclass(frozen=True, slots=True)
class StatusCodes:
    """Statuses that options can change.

    `throttle` is `throttle_error_http_code`, `not_ready` `wlm_error_http_code`, `timeout` `timeout_http_code`,
    `server_error` `server_error_http_code`. `failed` is for requests that were refused or failed by themselves.
    """

    failed: int = 424
    throttle: int = 503
    not_ready: int = 503
    timeout: int = 400
    server_error: int = 500


class Row(NamedTuple):
    """One class of errors. `status` names a field of `StatusCodes`; `djl_type` is None for the handler's body."""

    status: str
    djl_type: str | None
    tgi_type: str


ERRORS: dict[type[RequestError], Row] = {
    InvalidRequestError: Row("failed", None, "validation"),
    OverloadedError: Row("throttle", "WlmCapacityException", "overloaded"),
    NotReadyError: Row("not_ready", "WlmException", "unhealthy"),
    RequestTimeoutError: Row("timeout", "TranslateException", "incomplete_generation"),
    GenerationError: Row("failed", None, "generation"),
}
"""Subclasses share their nearest base's row."""

_FRONT_END_TYPES = {
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "RequestEntityTooLargeException",
    415: "UnsupportedMediaTypeException",
}


def reply(error: BaseException, codes: StatusCodes | None = None) -> Reply:
    """The answer to a request of which nothing was sent yet.

    An exception that is no RequestError is a defect: its message may hold internals and is for the log, not for
    the client.
    """
    codes = codes or StatusCodes()
    if not isinstance(error, RequestError):
        return front_end(codes.server_error, "Internal server error, see the server's log.", "InternalServerException")
    row = _row(error)
    status: int = getattr(codes, row.status)
    if row.djl_type is None:
        return Reply(status, _JSON, orjson.dumps({"error": str(error), "code": status}))
    body: dict[str, object] = {"code": status, "type": row.djl_type, "message": str(error)}
    if isinstance(error, OverloadedError):
        body |= {"queue_depth": error.queue_depth, "queue_capacity": error.capacity}
    retry_after = error.retry_after if isinstance(error, (OverloadedError, NotReadyError)) else None
    headers = () if retry_after is None else (("Retry-After", str(retry_after)),)
    return Reply(status, _JSON, _pretty(body), headers)


def front_end(status: int, message: str, djl_type: str | None = None) -> Reply:
    """An error that no model has part in: no such route, wrong method, body too large, media type."""
    if djl_type is None:
        djl_type = _FRONT_END_TYPES.get(status, "BadRequestException")
    return Reply(status, _JSON, _pretty({"code": status, "type": djl_type, "message": message}))


def tgi_error_type(error: RequestError) -> str:
    """TGI's `error_type`, by which its clients choose the exception to raise."""
    return _row(error).tgi_type


def _row(error: RequestError) -> Row:
    for ancestor in type(error).__mro__:
        if ancestor in ERRORS:
            return ERRORS[ancestor]
    return ERRORS[GenerationError]


def _pretty(body: dict[str, object]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
