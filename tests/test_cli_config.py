"""`djl-trtllm config` on each kind of configuration, and on two of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app

OLD = Path(__file__).parent / "config" / "old"
TRITON = OLD / "triton_llama_workflow" / "model"
TRUSS = OLD / "truss_trt_llm_build" / "model"


def model(path: Path, text: str) -> Path:
    path.mkdir()
    (path / "serving.properties").write_text(text)
    return path


@pytest.mark.parametrize("source", [TRITON, TRITON / "tensorrt_llm" / "config.pbtxt", TRUSS, TRUSS / "config.yaml"])
def test_the_command_shows_each(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJL_CACHE_DIR", "/nonexistent")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = CliRunner().invoke(app, ["config", str(source), "--json"])
    told = json.loads(result.stdout)
    assert (result.exit_code, told["served"]) == (1, False)  # the models that they name are not here
    options = told["options"]
    assert options["max_rolling_batch_size"]["value"] == 256


def test_the_command_prints_a_list_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one = model(tmp_path / "a", "option.max_input_len=8\n")
    other = model(tmp_path / "b", "option.max_input_len=9\n")
    shown = CliRunner().invoke(app, ["config", "--diff", str(one), str(other)])
    assert shown.exit_code == 0, shown.output
    assert "option.max_input_len" in shown.output and "8 tokens" in shown.output and "9 tokens" in shown.output
    result = CliRunner().invoke(app, ["config", "--json", "--diff", str(one), str(other)])
    data = json.loads(result.output)
    assert data["sources"] == [str(one), str(other)]
    assert [side["value"] for side in data["differences"]["max_input_len"]["sides"]] == [8, 9]


def test_a_broken_side_is_an_error_for_the_reader(tmp_path: Path) -> None:
    one = model(tmp_path / "a", "option.max_input_len=x\n")
    result = CliRunner().invoke(app, ["config", "--diff", str(one), str(one)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
