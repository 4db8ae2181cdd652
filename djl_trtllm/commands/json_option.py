"""Options whose value is JSON."""

from __future__ import annotations

import json
from typing import Any

from djl_trtllm.errors import DjlTrtllmError


def json_object(option: str, text: str) -> dict[str, Any]:
    """The object that an option has as its value. Raises DjlTrtllmError."""
    try:
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise DjlTrtllmError(f"{option} {text}: expected a JSON object: {error}") from None
    return value
