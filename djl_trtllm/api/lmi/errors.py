"""LMI's error table: the status and body of every error.

Errors of a request itself have the handler's body, `{"error", "code"}`; those of the server's state have the front
end's, with DJL's exception names as types. The statuses are DJL's, odd ones included (424 for bad input, 400 for a
timeout), and DJL's options can change them.
"""

from __future__ import annotations

from typing import NamedTuple

from djl_trtllm.api.base import Reply, error_headers, nearest_row, status_from
from djl_trtllm.api.front_end import front_end_error
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    AuthenticationError,
    ForbiddenError,
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    SessionError,
    TooManyRequestsError,
    UnknownModelError,
)

_FAILED = 424
"""The status of requests that were refused or failed by themselves."""


class ErrorRow(NamedTuple):
    """One class of errors. `status` is a number or the option that has it; `djl_type` None: the handler's body."""

    status: int | str
    djl_type: str | None
    tgi_type: str


ERRORS: dict[type[RequestError], ErrorRow] = {
    InvalidRequestError: ErrorRow(_FAILED, None, "validation"),
    SessionError: ErrorRow(400, None, "validation"),
    AuthenticationError: ErrorRow(401, "UnauthorizedException", "validation"),
    ForbiddenError: ErrorRow(403, "ForbiddenException", "validation"),
    UnknownModelError: ErrorRow(404, "ResourceNotFoundException", "validation"),
    MethodNotAllowedError: ErrorRow(405, "MethodNotAllowedException", "validation"),
    RequestTooLargeError: ErrorRow(413, "RequestEntityTooLargeException", "validation"),
    OverloadedError: ErrorRow("throttle_error_http_code", "WlmCapacityException", "overloaded"),
    TooManyRequestsError: ErrorRow(429, "TooManyRequestsException", "overloaded"),
    NotReadyError: ErrorRow("wlm_error_http_code", "WlmException", "unhealthy"),
    RequestTimeoutError: ErrorRow("timeout_http_code", "TranslateException", "incomplete_generation"),
    GenerationError: ErrorRow(_FAILED, None, "generation"),
}
"""Subclasses share the row of their nearest base."""


def encode_error(error: BaseException, options: Options) -> Reply:
    if not isinstance(error, RequestError):
        message = "Internal server error, see the server's log."
        return front_end_error(options.server_error_http_code, message, "InternalServerException")
    if isinstance(error, UnknownModelError) and error.name is None:
        return front_end_error(400, str(error))
    row = _row(error)
    status = status_from(row.status, options)
    if row.djl_type is None:
        return Reply.json({"error": str(error), "code": status}, status)
    fields: dict[str, object] = {}
    if isinstance(error, OverloadedError):
        fields = {"queue_depth": error.queue_depth, "queue_capacity": error.capacity}
    return front_end_error(status, str(error), row.djl_type, fields=fields, headers=error_headers(error))


def tgi_error_type(error: RequestError) -> str:
    """TGI's `error_type`, by which its clients choose the exception to raise."""
    return _row(error).tgi_type


def _row(error: RequestError) -> ErrorRow:
    return nearest_row(ERRORS, error, GenerationError)
