"""Shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from djl_trtllm.model import Tokenizer, load_tokenizer

TINY_STORIES = Path(__file__).parent.parent / "serving" / "models" / "tiny-stories"


@pytest.fixture(scope="session")
def tiny_stories() -> Path:
    """The bundled model's directory."""
    return TINY_STORIES


@pytest.fixture(scope="session")
def tokenizer(tiny_stories: Path) -> Tokenizer:
    """The bundled model's tokenizer."""
    return load_tokenizer(tiny_stories)
