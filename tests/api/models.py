"""A model directory with a `model.py`, loaded; shared by the tests of formatters of a model's own."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.custom.formatters import CustomFormatters, load_custom
from djl_trtllm.config import Options


def load(directory: Path, source: str, **attributes: Any) -> CustomFormatters:
    (directory / "model.py").write_text(textwrap.dedent(source))
    loaded = load_custom(directory, attributes)
    assert loaded is not None
    return loaded


def parse(formatters: CustomFormatters, payload: Any, **options: Any) -> Call:
    return parse_bytes(formatters, json.dumps(payload).encode(), {"x-team": "blue"}, **options)


def parse_bytes(
    formatters: CustomFormatters,
    body: bytes,
    headers: Mapping[str, str] = MappingProxyType({}),
    content_type: str | None = "application/json",
    **options: Any,
) -> Call:
    named = {} if content_type is None else {"content-type": content_type}
    return formatters.parse(RawRequest(body, {**headers, **named}), Options(**options))


WHOLE = {"inputs": "The wolf"}
STREAM = {"inputs": "The wolf", "stream": True}

HEAD = """
    from djl_python import Input
    from djl_python.input_parser import input_formatter
    from djl_python.request_io import RequestInput, TextInput

    @input_formatter
"""
"""The beginning of a `model.py` with an input formatter."""
