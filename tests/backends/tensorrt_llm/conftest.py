"""A played LLM, and a machine with the fake TensorRT-LLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.tensorrt_llm.kit import Machine, MakeEngine


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """`make(version, **options)`: TensorRT-LLM's executor over an LLM that is played."""
    return MakeEngine(monkeypatch)


@pytest.fixture
def machine(tmp_path: Path, tiny_stories: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine with the fake TensorRT-LLM."""
    return Machine(tmp_path, tiny_stories, monkeypatch)
