"""Reads TOML tables that are part of the package, such as those of `config/compat/`."""

import sys
from importlib import resources
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_table(name: str, package: str = "djl_trtllm.config.compat") -> dict[str, Any]:
    """The content of the TOML file `name` beside the modules of `package`."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)
    return found
