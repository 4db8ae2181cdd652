from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from djl_trtllm import cli
from djl_trtllm.commands.size_request import Recorder
from djl_trtllm.engines import hardware
from djl_trtllm.engines.hardware import GpuState
from djl_trtllm.errors import BenchmarkError, SizingError
from djl_trtllm.versus import rounds
from tests.support.tables import by_table
from tests.versus.test_report import measured, versus


@by_table("engines", "more", "said")
def test_a_wrong_comparison_is_an_error_that_names_it(engines: str, more: list[str], said: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["versus", str(tmp_path), "--engines", engines, *more])
    assert result.exit_code == 1
    assert said in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> rounds.Versus:
    """What every comparison finds."""
    found = versus(measured("vllm", (1, 10), (1, 40), (1, 30)), measured("openvino", (1, 20), (1, 20), (1, 20)))
    monkeypatch.setattr(rounds, "compare", lambda given, *_: given.__dict__.update(found.__dict__))
    return found


def run(*more: str) -> Any:
    return CliRunner().invoke(cli.app, ["versus", "model", "--engines", "vllm,openvino", *more])


def test_failed_requests_and_interrupts_decide_the_status(found: rounds.Versus) -> None:
    result = run()
    assert result.exit_code == 0 and "No engine is ahead" in result.stdout
    found.engines[1].rounds[0]["loads"][0]["requests"]["unfinished"] = 1
    assert run().exit_code == 3
    found.interrupted = True
    assert run().exit_code == 130
    found.engines[1].rounds.clear()
    result = run()
    assert (result.exit_code, result.stdout) == (130, "")


def test_what_was_measured_is_shown_before_what_went_wrong(found: rounds.Versus, tmp_path: Path) -> None:
    found.failure = BenchmarkError("openvino: the server ended")
    result = run()
    assert (result.exit_code, "most tok/s" in result.stdout, "the server ended" in result.stderr) == (1, True, True)
    found.failure = None
    (tmp_path / "plot.svg").mkdir()
    result = run("--plot", str(tmp_path / "plot.svg"))
    assert (result.exit_code, "most tok/s" in result.stdout, "--plot" in result.stderr) == (1, True, True)


def test_what_was_measured_is_shown_where_it_cannot_be_recorded(
    found: rounds.Versus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, *given: object) -> None:
            pass

        def write(self, loads: Any, prompt_tokens: int, command: str) -> None:
            raise SizingError("no room for points")

    monkeypatch.setattr(Recorder, "of", Full)
    monkeypatch.setattr(hardware, "read_states", lambda: (GpuState(1, 1),))
    result = run("--record")
    assert (result.exit_code, "most tok/s" in result.stdout, "no room" in result.stderr) == (1, True, True)


def test_the_round_of_the_median_throughput_is_recorded_of_each_engine(
    found: rounds.Versus, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[str, float, str]] = []

    class Keeps:
        def __init__(self, model: str, engine: str, gpu: str | None) -> None:
            self.engine = engine

        def write(self, loads: Any, prompt_tokens: int, command: str) -> None:
            kept.append((self.engine, loads[1]["output_tokens_per_second"], command))

    monkeypatch.setattr(Recorder, "of", Keeps)
    monkeypatch.setattr(hardware, "read_states", lambda: ())
    refused = run("--record")
    assert (refused.exit_code, kept) == (1, []) and "--record: " in refused.stderr
    monkeypatch.setattr(hardware, "read_states", lambda: (GpuState(1, 1),))
    assert run("--record").exit_code == 0
    assert kept == [("vllm", 30.0, "djl-trtllm versus model"), ("openvino", 20.0, "djl-trtllm versus model")]


def test_flags_are_the_plan_of_the_comparison(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[tuple[rounds.Versus, int]] = []
    monkeypatch.setattr(rounds, "compare", lambda found, count, say: given.append((found, count)))
    (tmp_path / "load.jsonl").write_text('{"prompt": "a"}\n')
    run()
    words = "--clients 2,3 --rounds 5 --duration 7 --warmup 1 --prompt-tokens 9 --output-tokens 4"
    run(*words.split(), "--instance", "g6.xlarge", "--load", str(tmp_path / "load.jsonl"))
    (plain, three), (full, five) = given
    assert (three, five) == (3, 5)
    assert (plain.model, plain.names, plain.instance) == ("model", ["vllm", "openvino"], None)
    assert full.instance is not None and full.instance.name == "g6.xlarge"
    loads = [[(load.concurrency, load.duration, load.warmup) for load in each.plan.loads] for each in (plain, full)]
    assert loads == [[(count, 10.0, 2.0) for count in (1, 4, 16, 64)], [(count, 7.0, 1.0) for count in (2, 3)]]
    plans = [(plan.api, plan.dataset, plan.prompt_tokens, plan.output_tokens) for plan in (plain.plan, full.plan)]
    assert plans == [("completions", "synthetic", 128, 128), ("completions", str(tmp_path / "load.jsonl"), 9, 4)]


def test_json_is_all_of_standard_output_and_warnings_are_beside_it(found: rounds.Versus) -> None:
    found.warnings = ["vllm: the engine process was lost"]
    result = run("--json")
    assert json.loads(result.stdout)["warnings"] == found.warnings
    assert "engine process was lost" in result.stderr


def test_options_that_differ_stand_between_the_figures_and_the_conclusion(found: rounds.Versus) -> None:
    assert "Options that differ" not in run().stdout
    found.differing = {"option.dtype": ["fp16", "bf16"]}
    lines = run().stdout.splitlines()
    heading = next(number for number, line in enumerate(lines) if "Options that differ" in line)
    assert any("most tok/s" in line for line in lines[:heading])
    assert any("option.dtype" in line and "bf16" in line for line in lines[heading:])
    assert lines[-1].startswith("No engine is ahead")


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="charts need matplotlib")
def test_the_picture_is_written_of_whole_comparisons(found: rounds.Versus, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    assert run("--plot", str(plot)).exit_code == 0
    assert plot.read_text().startswith("<svg")
    plot.unlink()
    found.engines[0].rounds.clear()
    found.interrupted = True
    assert (run("--plot", str(plot)).exit_code, plot.exists()) == (130, False)
