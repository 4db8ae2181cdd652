"""What the command refuses; `tests/offline/test_command.py` has what it generates."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.commands import generate


def test_without_a_model_it_says_what_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate, "find_model", lambda model: model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("tell me a story\n")
    refused = CliRunner().invoke(app, ["generate", "--prompts", str(prompts)])
    assert refused.exit_code == 1
    assert "no model given" in refused.stderr
    refused = CliRunner().invoke(app, ["generate", "--prompts", str(prompts), "--parameters", "[]"])
    assert "--parameters []: expected a JSON object" in refused.stderr
