"""OpenAI's errors: `{"error": {"message", "type", "param", "code"}}`, and the status of each.

The server's options change the same statuses as in LMI's dialect.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from djl_trtllm.api.base import Reply, error_headers, nearest_row, status_from
from djl_trtllm.config import Options
from djl_trtllm.errors import (
    AuthenticationError,
    ForbiddenError,
    GenerationError,
    InvalidRequestError,
    MethodNotAllowedError,
    NotReadyError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    TooManyRequestsError,
    UnknownAdapterError,
    UnknownModelError,
    UnsupportedParameterError,
)

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_PARAMETER = re.compile(r"'([\w.\[\]]+)'[^;]*")
"""A message about one parameter, which begins with its name."""


class ErrorRow(NamedTuple):
    """`status` is a number, or the option that has it."""

    status: int | str
    type: str
    code: str | None = None


ERRORS: dict[type[RequestError], ErrorRow] = {
    InvalidRequestError: ErrorRow(400, _INVALID),
    PromptTooLongError: ErrorRow(400, _INVALID, "context_length_exceeded"),
    UnknownAdapterError: ErrorRow(404, _INVALID, "model_not_found"),
    UnsupportedParameterError: ErrorRow(400, _INVALID, "unsupported_parameter"),
    UnknownModelError: ErrorRow(404, _INVALID, "model_not_found"),
    AuthenticationError: ErrorRow(401, _INVALID, "invalid_api_key"),
    ForbiddenError: ErrorRow(403, _INVALID, "insufficient_permissions"),
    MethodNotAllowedError: ErrorRow(405, _INVALID, "method_not_allowed"),
    RequestTooLargeError: ErrorRow(413, _INVALID, "request_too_large"),
    OverloadedError: ErrorRow("throttle_error_http_code", "overloaded_error", "overloaded"),
    TooManyRequestsError: ErrorRow(429, "requests", "rate_limit_exceeded"),
    NotReadyError: ErrorRow("wlm_error_http_code", _SERVER, "not_ready"),
    RequestTimeoutError: ErrorRow(504, _SERVER, "timeout"),
    GenerationError: ErrorRow(500, _SERVER),
}
"""Subclasses share the row of their nearest base."""


def encode_error(error: BaseException, options: Options) -> Reply:
    if not isinstance(error, RequestError):
        body = {"message": "Internal server error, see the server's log.", "type": _SERVER, "param": None, "code": None}
        return Reply.json({"error": body}, options.server_error_http_code)
    row = _row(error)
    reply = Reply.json({"error": error_object(error)}, status_from(row.status, options))
    return reply._replace(headers=error_headers(error))


def error_object(error: RequestError) -> dict[str, str | None]:
    """The value of `error`. `param` is the parameter that the message is about, if it is about one."""
    row, message = _row(error), str(error)
    named = _PARAMETER.fullmatch(message) if isinstance(error, InvalidRequestError) else None
    return {"message": message, "type": row.type, "param": named and named.group(1), "code": row.code}


def _row(error: RequestError) -> ErrorRow:
    return nearest_row(ERRORS, error, GenerationError)
