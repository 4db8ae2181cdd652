"""Truss's errors: `{"error"}` with Baseten's headers.

Source: `truss/templates/server/common/errors.py` (truss 0bee989): error code 500 where the server fails, 600 where the
model does, 700 where the request is at fault.
"""

from __future__ import annotations

from djl_trtllm.api.base import Reply, error_headers, nearest_row
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
    UnknownModelError,
)

_SERVER, _MODEL, _CLIENT = "500", "600", "700"
_SOURCE = ("X-BASETEN-ERROR-SOURCE", "04")
_CODE = "X-BASETEN-ERROR-CODE"

ERRORS: dict[type[RequestError], tuple[int, str]] = {
    InvalidRequestError: (400, _CLIENT),
    UnknownModelError: (404, _SERVER),
    AuthenticationError: (401, _CLIENT),
    ForbiddenError: (403, _CLIENT),
    MethodNotAllowedError: (405, _CLIENT),
    RequestTooLargeError: (413, _CLIENT),
    OverloadedError: (429, _SERVER),
    NotReadyError: (503, _SERVER),
    RequestTimeoutError: (504, _MODEL),
    GenerationError: (500, _MODEL),
}
"""Status and error code. Subclasses share the row of their nearest base."""


def encode_error(error: BaseException, options: Options) -> Reply:
    if not isinstance(error, RequestError):
        message = "Internal Server Error, see the server's log."
        reply = Reply.json({"error": message}, options.server_error_http_code)
        return reply._replace(headers=(_SOURCE, (_CODE, _SERVER)))
    status, code = nearest_row(ERRORS, error, GenerationError)
    return Reply.json({"error": str(error)}, status)._replace(headers=(_SOURCE, (_CODE, code), *error_headers(error)))
