"""One error of each kind, for tables of what a dialect makes of them."""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.mark import ParameterSet

from djl_trtllm.errors import (
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

ERRORS: dict[str, RequestError] = {
    type(error).__name__: error
    for error in (
        InvalidRequestError("no"),
        PromptTooLongError("no"),
        UnsupportedParameterError("no"),
        UnknownAdapterError("no"),
        UnknownModelError("no", name="hen"),
        MethodNotAllowedError("no", allow="POST"),
        RequestTooLargeError("no"),
        OverloadedError("no", queue_depth=1, capacity=1, retry_after=7),
        TooManyRequestsError("no", queue_depth=1, capacity=1, retry_after=7),
        NotReadyError("no", retry_after=5),
        RequestTimeoutError("no"),
        GenerationError("no"),
    )
}
HEADERS = {
    "MethodNotAllowedError": {"Allow": "POST"},
    "OverloadedError": {"Retry-After": "7"},
    "TooManyRequestsError": {"Retry-After": "7"},
    "NotReadyError": {"Retry-After": "5"},
}


def rows(**expected: tuple[Any, ...]) -> list[ParameterSet]:
    """For each error by name what is expected: cases of `pytest.mark.parametrize` whose first value is the error."""
    return [pytest.param(ERRORS[name], *row, id=name) for name, row in expected.items()]


def headers_of(error: RequestError) -> dict[str, str]:
    """The headers that say when to come back and what to use."""
    return HEADERS.get(type(error).__name__, {})
