from __future__ import annotations

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
