"""Request headers that dialects use: custom attributes and the request id."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Mapping

CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"
REQUEST_ID = "x-request-id"

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,256}")
"""An id appears in logs and in a response header: printable ASCII without spaces, of limited length."""


def properties(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Headers by lower-case name, with SageMaker's custom attributes added.

    `X-Amzn-SageMaker-Custom-Attributes: k=v;k2=v2` adds `k` and `k2`. A header overrides an attribute of the same
    name; the first of repeated headers is used.
    """
    found: dict[str, str] = {}
    for name, value in headers:
        found.setdefault(name.lower(), value)
    for name, value in custom_attributes(found.get(CUSTOM_ATTRIBUTES, "")).items():
        found.setdefault(name, value)
    return found


def custom_attributes(value: str) -> dict[str, str]:
    """Parse `k=v;k2=v2` into a dictionary with lower-case keys; items without `=` are skipped."""
    attributes: dict[str, str] = {}
    for item in value.split(";"):
        name, equals, content = item.partition("=")
        if equals and name.strip():
            attributes[name.strip().lower()] = content.strip()
    return attributes


def request_id(properties: Mapping[str, str], header: str = REQUEST_ID) -> str:
    """The id from the client, else SageMaker's inference id, else a new one.

    `header` is the configured header's name. An id that is too long or not printable is replaced.
    """
    for name in (header.lower(), INFERENCE_ID):
        given = properties.get(name, "").strip()
        if _USABLE_ID.fullmatch(given):
            return given
    return str(uuid.uuid4())
