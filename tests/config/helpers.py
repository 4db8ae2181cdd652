"""Shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from djl_trtllm.config import Config, Layer, parse_properties, read_environment, resolve
from djl_trtllm.errors import ConfigError


def from_text(text: str, environ: Mapping[str, str] | None = None, **others: str) -> Config:
    """Resolve a serving.properties of this text, an environment and a config.properties of the server."""
    sources = [*read_environment(environ or {}), parse_properties(text, "serving.properties")]
    if "server" in others:
        sources.append(parse_properties(others["server"], "config.properties", Layer.SERVER_FILE))
    return resolve(sources)


def problems_of(text: str, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        from_text(text, environ)
    return caught.value.problems
