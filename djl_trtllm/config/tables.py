"""Reads the TOML tables of `config/compat/`: foreign formats, variables, and options without effect."""

from __future__ import annotations

import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(name: str) -> dict[str, Any]:
    """The content of the TOML file `name`."""
    text = resources.files("djl_trtllm.config.compat").joinpath(name).read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)
    return found
