"""The record of constructor and generate_async calls, one JSON object per line."""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def record(call: str, arguments: Mapping[str, Any]) -> None:
    """Append a call to FAKE_TENSORRT_LLM_LOG; nothing where that is not set."""
    path = os.environ.get("FAKE_TENSORRT_LLM_LOG")
    if path:
        line = json.dumps({"call": call, "arguments": {name: plain(value) for name, value in arguments.items()}})
        # One write to a file opened for appending: processes do not mix their lines.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)


def plain(value: Any) -> Any:
    """As JSON: an object by its class and the fields that were passed explicitly, an enum member by its name."""
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__name__, "name": value.name}
    explicit = getattr(value, "explicit_fields", None)
    if explicit is not None:
        return {"class": type(value).__name__, **{name: plain(getattr(value, name)) for name in explicit()}}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value) if isinstance(value, Path) else repr(value)
