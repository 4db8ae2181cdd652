"""Shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.tools.tensorrt_llm.trees import Make, report_on
from tools.tensorrt_llm.check import Report


@pytest.fixture
def look(tmp_path: Path) -> Make:
    """Makes the checker's report on a small TensorRT-LLM, with some of its files replaced."""

    def make(replaced: Mapping[str, str | None] | None = None, version: str | None = None) -> Report:
        return report_on(tmp_path / "unpacked", replaced or {}, version)

    return make
