"""`djl-trtllm quality` with the scripted engine, which repeats the prompt, and ends where its script says."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.errors import BenchmarkError
from djl_trtllm.quality.figures import Thresholds
from tests.support.models import scripted_model
from tests.support.tables import by_table


def quality(*arguments: str | Path) -> Result:
    result = CliRunner().invoke(cli.app, ["quality", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return scripted_model(tmp_path / "whole")


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return scripted_model(tmp_path / "short", {"end_after": 3})


def test_a_model_agrees_with_itself_which_is_status_0(whole: Path) -> None:
    result = quality(whole, whole / "serving.properties", "--output-tokens", "6")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "agrees")


def test_models_that_differ_are_status_3_and_json_is_all_of_standard_output(whole: Path, short: Path) -> None:
    result = quality(whole, short, "--output-tokens", "6", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["verdict"]) == (3, "differs")
    assert found["first_difference"] == {"least": 4, "median": 4}


def test_thresholds_are_flags(whole: Path, short: Path) -> None:
    """Three of four tokens agree."""
    flags = ("--output-tokens", "6", "--kl", "9")
    assert quality(whole, short, *flags, "--agreement", "0.75").exit_code == 0
    assert quality(whole, short, *flags, "--agreement", "0.76").exit_code == 3


def test_both_sides_and_the_thresholds_are_as_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []

    def run(*given: Any) -> None:
        called.append(given[:5])
        raise BenchmarkError("that is enough")

    monkeypatch.setattr("djl_trtllm.quality.sides.open_side", lambda *given: given)
    monkeypatch.setattr("djl_trtllm.quality.report.run", run)
    flags = (
        "--prompts FILE --output-tokens 3 --agreement 0.5 --kl 0.2 --perplexity 1.5 --model m --api-key k --timeout 9"
    )
    assert quality("A", "B", *flags.split()).exit_code == 1
    shared = ({"Authorization": "Bearer k"}, "m", 9.0)
    assert called == [(("A", *shared), ("B", *shared), Path("FILE"), 3, Thresholds(0.5, 0.2, 1.5))]


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="charts need matplotlib")
def test_the_picture_is_written(whole: Path, tmp_path: Path) -> None:
    assert quality(whole, whole, "--plot", tmp_path / "picture.svg").exit_code == 0
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def test_the_log_shows_warnings(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[str] = []
    monkeypatch.setattr("djl_trtllm.commands.quality.configure", levels.append)
    quality(whole, whole.with_name("missing"))
    assert levels == ["warning"]


@by_table("arguments", "error")
def test_what_cannot_be_compared_is_said(tmp_path: Path, arguments: list[str], error: str) -> None:
    result = quality(*[each.replace("{FOLDER}", str(tmp_path)) for each in arguments])
    assert result.exit_code == 1
    assert error in " ".join(result.stderr.split())
