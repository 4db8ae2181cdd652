"""Dialects: the HTTP APIs that this package speaks.

`base` says what a dialect is, `registry` lists them, and each has a folder. The other modules are what dialects share.
"""

from djl_trtllm.api.base import (
    Call,
    Dialect,
    ModelContext,
    ModelStatus,
    Operation,
    Prompt,
    RawRequest,
    Reply,
    RequestParser,
    ResponseEncoder,
)

__all__ = [
    "Call",
    "Dialect",
    "ModelContext",
    "ModelStatus",
    "Operation",
    "Prompt",
    "RawRequest",
    "Reply",
    "RequestParser",
    "ResponseEncoder",
]
