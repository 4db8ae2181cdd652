"""A model directory with a `model.py`, loaded; shared by the tests of formatters of a model's own."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from djl_trtllm.api import Call, RawRequest
from djl_trtllm.api.base import RequestParser
from djl_trtllm.api.dialects.lmi.custom import CustomFormatters, load_custom
from djl_trtllm.api.kept import Kept
from djl_trtllm.api.registry import LMI
from djl_trtllm.config import Options


def load(directory: Path, source: str, **attributes: Any) -> CustomFormatters:
    (directory / "model.py").write_text(textwrap.dedent(source))
    loaded = load_custom(directory, LMI.read, attributes)
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
    return formatters.parse(RawRequest(body, {**headers, **named}), PlayedModel(Options(**options)))


WHOLE = {"inputs": "The wolf"}
STREAM = {"inputs": "The wolf", "stream": True}

HEAD = """
    from djl_python import Input
    from djl_python.input_parser import input_formatter
    from djl_python.request_io import RequestInput, TextInput

    @input_formatter
"""
"""The beginning of a `model.py` with an input formatter."""


@dataclass
class PlayedTokenizer:
    """As much of a tokenizer as dialects read. `template` is the source of its chat template."""

    template: str = ""
    end_ids = frozenset({2, 7})
    vocab_size = 100

    def chat_source(self, tools: bool) -> str:
        return self.template


@dataclass
class PlayedModel:
    """A `ModelContext`."""

    options: Options = field(default_factory=Options)
    name: str = "story"
    tokenizer: Any = field(default_factory=PlayedTokenizer)
    custom: RequestParser | None = None
    max_seq_len: int = 64
    kept: Kept = field(default_factory=Kept)
