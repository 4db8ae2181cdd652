"""Text of settings for readers."""

from typing import Any

from djl_trtllm.config.options import OPTIONS
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.sources import Config, Origin, masked


def format_setting(config: Config, name: str) -> str:
    """`KEY=VALUE (origin)` of the option of this field, with secrets masked."""
    return format_value(name, getattr(config.options, name), config.origin(name))


def format_value(name: str, value: Any, origin: Origin) -> str:
    """`KEY=VALUE (origin)` of any value of this field, with secrets masked."""
    key = OPTIONS[name].key
    return f"{key}={masked(key, as_text(value)) or 'none'} ({masked('', str(origin))})"
