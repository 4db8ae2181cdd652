"""Triton's errors: a message with one of its status codes, and the HTTP status of each.

Sources: `http_server.cc` and `tritonserver.h` of Triton (e1db8a6). Over HTTP the body is `{"error"}`.
"""

from __future__ import annotations

from typing import NamedTuple

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
    TooManyRequestsError,
    UnknownAdapterError,
    UnknownModelError,
)


class Status(NamedTuple):
    """`name` is Triton's, which is the name of the gRPC status but for INVALID_ARG."""

    name: str
    http: int

    @property
    def grpc(self) -> str:
        """gRPC's name of it."""
        return "INVALID_ARGUMENT" if self.name == "INVALID_ARG" else self.name


INTERNAL = Status("INTERNAL", 500)
_INVALID = Status("INVALID_ARG", 400)
_UNAVAILABLE = Status("UNAVAILABLE", 503)

ERRORS: dict[type[RequestError], Status] = {
    InvalidRequestError: _INVALID,
    UnknownAdapterError: Status("NOT_FOUND", 404),
    UnknownModelError: Status("NOT_FOUND", 404),
    AuthenticationError: Status("UNAUTHENTICATED", 401),
    ForbiddenError: Status("PERMISSION_DENIED", 403),
    MethodNotAllowedError: Status("INVALID_ARG", 405),
    RequestTooLargeError: _INVALID,
    OverloadedError: _UNAVAILABLE,
    TooManyRequestsError: Status("RESOURCE_EXHAUSTED", 429),
    NotReadyError: _UNAVAILABLE,
    RequestTimeoutError: _UNAVAILABLE,
    GenerationError: INTERNAL,
}
"""Subclasses share the row of their nearest base."""

DEFECT = "Internal server error, see the server's log."
"""Told instead of the message of an exception that is a defect."""


def status_of(error: BaseException) -> Status:
    """The status of an error; INTERNAL for a defect."""
    return nearest_row(ERRORS, error, GenerationError) if isinstance(error, RequestError) else INTERNAL


def encode_error(error: BaseException, options: Options) -> Reply:
    """The reply over HTTP."""
    if not isinstance(error, RequestError):
        return Reply.json({"error": DEFECT}, options.server_error_http_code)
    return Reply.json({"error": str(error)}, status_of(error).http)._replace(headers=error_headers(error))
