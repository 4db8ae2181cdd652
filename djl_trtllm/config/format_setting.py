"""Options with their values and origins, for messages."""

from __future__ import annotations

from typing import Any

from djl_trtllm.config.configuration import Config
from djl_trtllm.config.masking import masked
from djl_trtllm.config.options.registry import OPTIONS
from djl_trtllm.config.options.values import as_text
from djl_trtllm.config.sources.origin import Origin


def format_setting(config: Config, name: str) -> str:
    """`KEY=VALUE (origin)` of the option of this field, with secrets masked."""
    return format_value(name, getattr(config.options, name), config.origin(name))


def format_value(name: str, value: Any, origin: Origin) -> str:
    """The same for another value of this field."""
    key = OPTIONS[name].key
    return f"{key}={masked(key, as_text(value)) or 'none'} ({masked('', str(origin))})"
