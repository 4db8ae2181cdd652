"""`djl-trtllm size --measure`: flags, status and output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from djl_trtllm.cli import app
from djl_trtllm.finder.load import Load
from tests.finder.helpers import Played, model_with

runner = CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(model_with(tmp_path / "model"))


def test_the_result_ends_with_the_option_to_paste(model: str, trials: Played) -> None:
    result = runner.invoke(app, ["size", model, "--measure"])
    assert result.exit_code == 0
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(f"Maximum: max_num_tokens=24,000 ({len(trials.tried)} trials, ")
    assert last == "option.max_num_tokens=12000"
    assert "trial 1 of at most 20" in result.stderr


def test_json_is_all_of_standard_output(model: str, trials: Played) -> None:
    result = runner.invoke(app, ["size", model, "--measure", "--json", "--precision", "0.5"])
    found = json.loads(result.stdout)
    assert found["recommended"] == found["max_num_tokens"] // 2
    assert len(found["trials"]) == len(trials.tried)


def test_flags_are_options_the_load_and_the_bound(model: str, trials: Played) -> None:
    flags = ["--requests", "7", "--request-tokens", "300", "--memory", "5GB", "--kv-cache-dtype", "fp8", "--isl", "500"]
    assert runner.invoke(app, ["size", model, "--measure", *flags]).exit_code == 0
    spec = trials.specs[0]
    assert (spec.load, spec.memory) == (Load(7, 300), 5 * 10**9)
    assert {"kv_cache_dtype": "fp8", "max_input_len": "500"}.items() <= spec.options.items()


def test_the_largest_number_that_makes_a_difference_is_said_to_be_that(model: str, trials: Played) -> None:
    trials.bound = 1 << 30
    result = runner.invoke(app, ["size", model, "--measure"])
    assert "max_num_tokens=1,048,576, the largest that makes a difference (" in result.stdout


def test_what_does_not_fit_ends_with_status_1(model: str, trials: Played) -> None:
    trials.bound = 1
    result = runner.invoke(app, ["size", model, "--measure"])
    assert result.exit_code == 1
    assert result.stdout.startswith("Out of memory with every max_num_tokens down to 64, while answering requests: std")


def test_another_failure_ends_with_status_1_and_its_reason(model: str, trials: Played) -> None:
    trials.failing = lambda tokens: True
    result = runner.invoke(app, ["size", model, "--measure"])
    assert result.exit_code == 1
    assert "error:" in result.stderr and "it is broken" in result.stderr


def test_an_interrupt_says_how_to_go_on(model: str, trials: Played) -> None:
    trials.interrupted = 3
    result = runner.invoke(app, ["size", model, "--measure"])
    assert result.exit_code == 130
    assert result.stderr.rstrip().endswith("run the same command again to go on; finished trials are kept")
    trials.interrupted = None
    again = runner.invoke(app, ["size", model, "--measure"])
    assert "known: 3, going on; --fresh forgets them" in again.stderr
    assert again.stdout.endswith("option.max_num_tokens=12000\n")
    before = len(trials.tried)
    assert runner.invoke(app, ["size", model, "--measure", "--fresh"]).exit_code == 0
    assert len(trials.tried) > before + 3


@pytest.mark.parametrize(
    "flags", [["--gpu", "h200"], ["--compare"], ["--tp", "1,2"], ["--like", "trtllm-bench"], ["--strict"]]
)
def test_only_this_machine_is_measured(model: str, trials: Played, flags: list[str]) -> None:
    result = runner.invoke(app, ["size", model, "--measure", *flags])
    assert result.exit_code == 1
    assert "--measure measures this machine" in result.stderr
    assert trials.tried == []


@pytest.mark.parametrize("memory", ["much", "0", "GB"])
def test_a_bound_is_a_number_of_bytes(model: str, trials: Played, memory: str) -> None:
    result = runner.invoke(app, ["size", model, "--measure", "--memory", memory])
    assert result.exit_code == 1
    assert f"--memory {memory}: expected the memory of an engine on the CPU in bytes, or as 8GB" in result.stderr


@pytest.mark.parametrize("flags", [["--fresh"], ["--memory", "8GB"], ["--precision", "0"], ["--requests", "1"]])
def test_flags_of_a_measurement_want_one(model: str, flags: list[str]) -> None:
    result = runner.invoke(app, ["size", model, *flags])
    assert result.exit_code == 1
    assert "--fresh are flags of --measure" in result.stderr
