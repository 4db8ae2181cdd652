"""TGI's errors: `{"error", "error_type"}`, by whose type its clients choose the exception to raise.

Source: `router/src/server.rs` and `router/src/infer/mod.rs` of TGI (db931fc).
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

ERRORS: dict[type[RequestError], tuple[int, str]] = {
    InvalidRequestError: (422, "validation"),
    UnknownModelError: (404, "validation"),
    AuthenticationError: (401, "authentication"),
    ForbiddenError: (403, "authentication"),
    MethodNotAllowedError: (405, "validation"),
    RequestTooLargeError: (413, "validation"),
    OverloadedError: (429, "overloaded"),
    NotReadyError: (503, "unhealthy"),
    RequestTimeoutError: (500, "incomplete_generation"),
    GenerationError: (424, "generation"),
}
"""Status and type. Subclasses share the row of their nearest base."""


def encode_error(error: BaseException, options: Options) -> Reply:
    if not isinstance(error, RequestError):
        body = {"error": "Internal server error, see the server's log.", "error_type": "generation"}
        return Reply.json(body, options.server_error_http_code)
    reply = Reply.json(error_body(error), nearest_row(ERRORS, error, GenerationError)[0])
    return reply._replace(headers=error_headers(error))


def error_body(error: RequestError) -> dict[str, str]:
    return {"error": str(error), "error_type": nearest_row(ERRORS, error, GenerationError)[1]}
