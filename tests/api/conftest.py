"""Shared by the tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def _forget(names: set[str]) -> None:
    for name in names:
        if name.partition(".")[0] in ("djl_python", "wording") or name.startswith("djl_trtllm_model_"):
            del sys.modules[name]


@pytest.fixture
def clean_imports() -> Iterator[None]:
    """What a `model.py` imported, in this test or one before it, is gone."""
    _forget(set(sys.modules))
    modules, path = set(sys.modules), list(sys.path)
    yield
    _forget(set(sys.modules) - modules)
    sys.path[:] = path
