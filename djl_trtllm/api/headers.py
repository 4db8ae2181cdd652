"""Request headers that dialects use: custom attributes, the request id, and what the client accepts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Mapping

from djl_trtllm.request import new_uuid

CUSTOM_ATTRIBUTES = "x-amzn-sagemaker-custom-attributes"
INFERENCE_ID = "x-amzn-sagemaker-inference-id"
TARGET_MODEL = "x-amzn-sagemaker-target-model"
REQUEST_ID = "x-request-id"

_EVENTS = "text/event-stream"
_LINES = frozenset({"application/jsonlines", "application/json-lines", "application/x-ndjson"})
_READS_EVENTS = ("hf_hub/", "openai/")
"""In the User-Agent of huggingface_hub and of OpenAI's libraries, which read streams as events only."""

_OF_THE_BODY = frozenset({"content-length", "content-encoding", "transfer-encoding", "inference-header-content-length"})
"""Headers that say how the body is sent. Only the client that sends it knows: no attribute has their place."""

_RETURNED = re.compile(r"[\x20-\x7e]{1,1024}")
"""Custom attributes that a response may carry: SageMaker takes 1024 characters of visible ASCII."""

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
    """Parse `k=v;k2=v2` into a dictionary with lower-case keys; items without `=` are skipped, and those that
    would describe how the body is sent."""
    attributes: dict[str, str] = {}
    for item in value.split(";"):
        name, equals, content = item.partition("=")
        name = name.strip().lower()
        if equals and name and name not in _OF_THE_BODY:
            attributes[name] = content.strip()
    return attributes


def returned_attributes(properties: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The response header with the custom attributes of the request, by which callers match the two."""
    given = properties.get(CUSTOM_ATTRIBUTES, "").strip()
    return ((CUSTOM_ATTRIBUTES, given),) if _RETURNED.fullmatch(given) else ()


def request_id(properties: Mapping[str, str], header: str = REQUEST_ID) -> str:
    """The id from the client, else SageMaker's inference id, else a new one.

    `header` is the configured header's name. An id that is too long or not printable is replaced.
    """
    for name in (header.lower(), INFERENCE_ID):
        given = properties.get(name, "").strip()
        if _USABLE_ID.fullmatch(given):
            return given
    return str(new_uuid())


def from_hugging_face(properties: Mapping[str, str]) -> bool:
    """Whether the client is huggingface_hub, which expects TGI's names in what it reads."""
    return "hf_hub/" in properties.get("user-agent", "").lower()


def prefers_events(properties: Mapping[str, str]) -> bool | None:
    """Whether the client wants streams as server-sent events (True) or as lines (False); None if it does not say.

    `Accept` decides. Without either type in it, clients that read nothing but events get events: they send
    `Accept: */*` or `application/json`, and would skip every line of a stream without an error.
    """
    best, found = 0.0, None
    for item in properties.get("accept", "").lower().split(","):
        media_type, *parameters = (part.strip() for part in item.split(";"))
        quality = _quality(parameters)
        if (media_type == _EVENTS or media_type in _LINES) and quality > best:
            best, found = quality, media_type == _EVENTS
    if found is None and any(name in properties.get("user-agent", "").lower() for name in _READS_EVENTS):
        return True
    return found


def _quality(parameters: Iterable[str]) -> float:
    """The `q` of a media type, 1 if there is none that is a number."""
    for parameter in parameters:
        if parameter.startswith("q="):
            with contextlib.suppress(ValueError):
                return float(parameter[2:])
    return 1.0
