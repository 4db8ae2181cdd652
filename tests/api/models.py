"""A model directory with a `model.py`, loaded; shared by the tests of formatters of a model's own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from djl_trtllm.api import Call, Defaults
from djl_trtllm.api.custom.formatters import CustomFormatters, load_custom


def load(directory: Path, source: str, **attributes: Any) -> CustomFormatters:
    (directory / "model.py").write_text(textwrap.dedent(source))
    loaded = load_custom(directory, attributes)
    assert loaded is not None
    return loaded


def parse(formatters: CustomFormatters, payload: Any, defaults: Defaults = Defaults()) -> Call:  # noqa: B008
    return formatters.parse(json.dumps(payload).encode(), "application/json", defaults, {"x-team": "blue"})


WHOLE = {"inputs": "The wolf"}
STREAM = {"inputs": "The wolf", "stream": True}

HEAD = """
    from djl_python import Input
    from djl_python.input_parser import input_formatter
    from djl_python.request_io import RequestInput, TextInput

    @input_formatter
"""
"""The beginning of a `model.py` with an input formatter."""
