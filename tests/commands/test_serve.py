from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.commands import find_model

runner = CliRunner()


@pytest.fixture(autouse=True)
def no_sagemaker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(find_model, "SAGEMAKER_MODEL_DIR", tmp_path / "opt-ml-model")


def test_wrong_configuration_is_a_message_and_not_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "serving.properties").write_text("option.max_input_len=many\noption.max_output_len=0\n")
    result = runner.invoke(app, ["serve", str(tmp_path)])
    assert result.exit_code == 1
    assert "2 configuration problems" in result.stderr
    assert "serving.properties:1" in result.stderr
    assert "Traceback" not in result.output


def test_serve_without_a_model_says_what_to_name() -> None:
    result = runner.invoke(app, ["serve"])
    assert result.exit_code == 1
    assert "name a model directory" in result.stderr


@pytest.mark.parametrize(("option", "names"), [("--log-level", "'debug', 'info',"), ("--log-format", "'text', 'json'")])
def test_an_unknown_level_or_format_of_the_log_is_an_error_that_names_them(option: str, names: str) -> None:
    result = runner.invoke(app, ["serve", option, "loud"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert names in result.stderr


def test_a_level_in_the_environment_is_checked_too() -> None:
    result = runner.invoke(app, ["serve", str(Path.cwd())], env={"SERVING_LOG_LEVEL": "loud"})
    assert result.exit_code == 1
    assert "expected one of debug, info, warning, error, critical" in result.stderr


def test_a_level_is_one_in_capitals_too(tmp_path: Path) -> None:
    result = runner.invoke(app, ["serve", str(tmp_path / "nowhere"), "--log-level", "DEBUG"])
    assert "no model at" in result.stderr


def test_demo_and_a_model_are_a_contradiction() -> None:
    refused = runner.invoke(app, ["serve", "--demo", "some/model"])
    assert refused.exit_code != 0
    assert "--demo serves a model of its own: leave out some/model" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("--port", "70000", "0<=x<=65535"),
        ("--port", "-1", "0<=x<=65535"),
        ("--model-store", "/no/such/folder", "does not exist"),
        ("--model-store", __file__, "is a file"),
    ],
)
def test_a_wrong_value_of_an_option_is_reported_by_the_name_of_the_option(
    option: str, value: str, problem: str
) -> None:
    refused = runner.invoke(app, ["serve", option, value], env={"COLUMNS": "400"})
    assert refused.exit_code == 2
    assert f"'{option}'" in refused.stderr
    assert problem in refused.stderr
