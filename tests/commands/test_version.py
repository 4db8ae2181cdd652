from __future__ import annotations

import pytest
from typer.testing import CliRunner

import djl_trtllm
from djl_trtllm.cli import app


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version_is_the_packages(word: str) -> None:
    result = CliRunner().invoke(app, [word])
    assert result.exit_code == 0
    assert result.stdout.strip() == djl_trtllm.__version__
