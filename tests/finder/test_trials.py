"""Trials in processes of their own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.load import Load
from djl_trtllm.finder.trial import Report, TrialSpec
from djl_trtllm.finder.trials import TrialResult, run_trial
from tests.finder.helpers import model_with

LOAD = Load(4, 40)


def trial(model: Path, tokens: int = 1000) -> TrialResult:
    spec = TrialSpec(str(model), {"max_num_tokens": str(tokens)}, LOAD)
    return run_trial(spec, model.parent / "trial.log", lambda report: None)


def test_a_number_fits_or_memory_runs_out_or_something_else_fails(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"memory_tokens": 1000, "memory_phase": "requests"})
    fits = trial(model)
    assert (fits.outcome.kind, fits.outcome.phase) == ("fits", "requests")
    assert fits.reports[-1] == Report("requests", done=True, load=LOAD)
    assert fits.seconds > 0
    too_large = trial(model, 1001).outcome
    assert (too_large.kind, too_large.phase) == ("memory", "requests")
    assert "std::bad_alloc" in too_large.reason
    broken = trial(model_with(tmp_path / "broken", {"start_error": "no such device"})).outcome
    assert (broken.kind, broken.phase) == ("failed", "load")
    assert "no such device" in broken.reason
    assert "no such device" in (tmp_path / "trial.log").read_text()


def test_a_kill_that_was_not_the_kernels_is_no_lack_of_memory(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"faults": [{"action": "die"}]})
    outcome = trial(model).outcome
    assert (outcome.kind, outcome.phase) == ("failed", "requests")
    assert "killed by somebody else" in outcome.reason


def test_a_trial_that_is_killed_has_no_result(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"steps_per_second": 1})

    def kill(report: Report | None) -> None:
        if report is not None and report.phase == "requests":
            (child,) = psutil.Process().children()
            child.kill()

    spec = TrialSpec(str(model), {}, LOAD)
    outcome = run_trial(spec, tmp_path / "log", kill).outcome
    assert (outcome.kind, outcome.reason) == (
        "failed",
        "the trial's process ended with status -9 while answering requests",
    )


@pytest.mark.parametrize("phase", ["build", "load", "requests"])
def test_after_an_interrupt_nothing_of_a_trial_is_left(tmp_path: Path, phase: str) -> None:
    model = model_with(tmp_path / "model", {"steps_per_second": 1, "start_seconds": 1})
    seen: list[psutil.Process] = []

    def interrupt(report: Report | None) -> None:
        seen.extend(psutil.Process().children(recursive=True))
        if report is not None and report.phase == phase:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_trial(TrialSpec(str(model), {}, LOAD), tmp_path / "log", interrupt)
    assert seen
    psutil.wait_procs(seen, timeout=10)
    assert [process for process in seen if process.is_running()] == []
    assert psutil.Process().children(recursive=True) == []


def test_the_time_goes_on_between_reports(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"start_seconds": 2.5})
    ticks = 0

    def count(report: Report | None) -> None:
        nonlocal ticks
        ticks += report is None

    run_trial(TrialSpec(str(model), {}, LOAD), tmp_path / "log", count)
    assert ticks >= 1


def test_the_working_directory_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    assert trial(model_with(tmp_path / "model")).outcome.kind == "fits"


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DjlTrtllmError, match="no process can be started for a trial"):
        run_trial(TrialSpec("model", {}, LOAD), tmp_path / "none" / "log", lambda report: None)
