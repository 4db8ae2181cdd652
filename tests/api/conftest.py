"""Shared by the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def clean_imports() -> Iterator[None]:
    """What a `model.py` imported is gone afterwards."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("djl_python", "wording") or name.startswith("djl_trtllm_model_"):
            del sys.modules[name]
    sys.path[:] = path
