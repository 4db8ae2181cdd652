"""Errors in the format of DJL Serving's front end, `{"code", "type", "message"}`."""

from __future__ import annotations

import orjson

from djl_trtllm.api.base import Reply

_TYPES = {
    404: "ResourceNotFoundException",
    405: "MethodNotAllowedException",
    413: "RequestEntityTooLargeException",
    415: "UnsupportedMediaTypeException",
    503: "ServiceUnavailableException",
}


def front_end_error(
    status: int,
    message: str,
    djl_type: str | None = None,
    *,
    fields: dict[str, object] | None = None,
    headers: tuple[tuple[str, str], ...] = (),
) -> Reply:
    """The reply with this status. `djl_type` is DJL's exception name, by default that of the status.

    `fields` follow these three.
    """
    body: dict[str, object] = {
        "code": status,
        "type": djl_type or _TYPES.get(status, "BadRequestException"),
        "message": message,
        **(fields or {}),
    }
    # As DJL prints it: indented, with a line end.
    encoded = orjson.dumps(body, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
    return Reply(status, "application/json", encoded, headers)


def method_not_allowed(message: str, allow: str) -> Reply:
    """405; `allow` lists the methods that the path takes."""
    return front_end_error(405, message, headers=(("Allow", allow),))
