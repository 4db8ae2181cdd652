"""What the commands work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.finder.conftest import trials

__all__ = ["model", "trials"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "story").mkdir()
    (tmp_path / "story" / "serving.properties").write_text("option.model_id=acme/story\n")
    return tmp_path / "story"
