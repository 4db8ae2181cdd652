"""The table of names is what the installed TensorRT-LLM has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trtllm.conftest import START_SECONDS, Installation

pytestmark = pytest.mark.timeout(START_SECONDS + 60)


def test_the_table_is_what_is_there(installation: Installation) -> None:
    """Names that were not seen are no failure: the report lists them, and nothing calls them verified."""
    if installation.is_fake:
        pytest.skip("tests/tools/tensorrt_llm/test_check.py compares the fake")
    process = subprocess.run(
        [sys.executable, "-m", "tools.tensorrt_llm.check"],
        cwd=Path(__file__).parents[2],  # where tools/ is
        env={**os.environ, **installation.environ},
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    print(process.stdout)
    assert f"TensorRT-LLM {installation.version}, imported from" in process.stdout, process.stderr
    assert "\n  different" not in process.stdout
