"""Options as messages cite them."""

from __future__ import annotations

from djl_trtllm.config import Config


def format_setting(config: Config, field: str) -> str:
    """`option.NAME=VALUE (origin)`, for an option whose key is its field's name."""
    value = getattr(config.options, field)
    return f"option.{field}={'none' if value is None else value} ({config.origin(field)})"
