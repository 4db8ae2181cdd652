"""Shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from djl_trtllm.config.tensorrt_llm_check import Report
from tests.config.trees import Make, report_on


@pytest.fixture
def look(tmp_path: Path) -> Make:
    """Makes the checker's report on a small TensorRT-LLM, with some of its files replaced."""

    def make(replaced: Mapping[str, str | None] | None = None, version: str | None = None) -> Report:
        return report_on(tmp_path / "unpacked", replaced or {}, version)

    return make
