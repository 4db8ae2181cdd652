"""The measurement, with trials that are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.load import Load
from djl_trtllm.finder.measure import Finder, Measured, RunTrial, Settings
from djl_trtllm.finder.outcome import Outcome
from djl_trtllm.finder.subject import LOWEST, open_subject
from djl_trtllm.finder.trial import Report, TrialSpec
from djl_trtllm.finder.trials import TrialResult
from djl_trtllm.sizing.search import most_trials
from tests.finder.helpers import Played, model_with

HIGHEST = 256 * 4096


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_with(tmp_path / "model")


def measured(model: Path, trials: Played, load: Load | None = None, **settings: object) -> Measured:
    subject = open_subject(str(model), {}, load or Load())
    return Finder(subject, Settings(**settings), run=trials).measure()  # type: ignore[arg-type]


@pytest.mark.parametrize("bound", [LOWEST, 1190, 12_345, 24_000, 498_000, HIGHEST - 1, HIGHEST])
def test_a_bound_is_found_exactly_in_the_trials_of_a_binary_search(model: Path, bound: int) -> None:
    trials = Played(bound)
    found = measured(model, trials)
    assert found.max_num_tokens == bound
    assert found.recommended == bound // 2
    assert found.unbounded == (bound == HIGHEST)
    most = most_trials(HIGHEST - LOWEST + 1)
    assert most == 20
    assert most - 1 <= len(trials.tried) <= most
    assert [attempt.tokens for attempt in found.attempts] == trials.tried
    assert [attempt.fits for attempt in found.attempts] == [tokens <= bound for tokens in trials.tried]


def test_a_model_that_does_not_fit_at_all_has_no_maximum(model: Path) -> None:
    trials = Played(LOWEST - 1)
    found = measured(model, trials)
    assert (found.max_num_tokens, found.recommended) == (None, None)
    assert trials.tried[-1] == LOWEST
    assert found.attempts[-1].reason == "std::bad_alloc"


def test_a_precision_saves_trials(model: Path) -> None:
    trials = Played(24_000)
    found = measured(model, trials, precision=0.05)
    assert found.max_num_tokens is not None
    assert 24_000 / 1.05 <= found.max_num_tokens <= 24_000
    assert len(trials.tried) <= 8


def test_a_failure_that_is_no_lack_of_memory_ends_the_search_with_its_reason(model: Path) -> None:
    trials = Played(24_000, failing=lambda tokens: tokens < 100_000)
    with pytest.raises(DjlTrtllmError, match=r"(?s)loading the engine: it is broken.*no lack of memory.*Log of the"):
        measured(model, trials)
    before = list(trials.tried)
    # What was found before is kept, and the trial that failed is repeated.
    repaired = Played(24_000)
    assert measured(model, repaired).max_num_tokens == 24_000
    assert repaired.tried[0] == before[-1]


@pytest.mark.parametrize("after", [0, 1, 7, 19])
def test_an_interrupted_measurement_goes_on(model: Path, after: int) -> None:
    whole = Played(24_000)
    reference = measured(model, whole, fresh=True)
    reference.state.unlink()
    first = Played(24_000, interrupted=after)
    with pytest.raises(KeyboardInterrupt):
        measured(model, first)
    second = Played(24_000)
    found = measured(model, second)
    assert found.max_num_tokens == 24_000
    assert first.tried + second.tried == whole.tried
    assert found.earlier == after
    assert found.as_json()["trials_of_earlier_runs"] == after


def test_a_result_is_not_measured_twice_unless_asked(model: Path) -> None:
    measured(model, Played(24_000))
    again = Played(30_000)
    assert measured(model, again).max_num_tokens == 24_000
    assert again.tried == []
    assert measured(model, Played(30_000), fresh=True).max_num_tokens == 30_000


def test_other_conditions_are_another_measurement(model: Path) -> None:
    measured(model, Played(24_000))
    others = [
        measured(model, Played(24_001), Load(64)),
        measured(model, Played(24_001), memory=1 << 30),
        measured(model, Played(24_001), precision=0.001),
    ]
    properties = model / "serving.properties"
    properties.write_text(properties.read_text() + "option.max_beam_width=1\n")
    others.append(measured(model, Played(24_001)))
    assert {found.earlier for found in others} == {0}
    assert len({found.state for found in others}) == len(others)


def test_trials_get_the_options_the_load_and_the_bound(model: Path) -> None:
    trials = Played(24_000)
    subject = open_subject(str(model), {"dtype": "bfloat16", "max_output_len": None}, Load(7, 300))
    Finder(subject, Settings(memory=5 << 30), run=trials).measure()
    spec = trials.specs[0]
    assert spec.model == str(model)
    assert spec.options == {
        "dtype": "bfloat16",
        "option.engine_cache": "",
        "option.strict_memory": "false",
        "option.max_num_tokens": str(trials.tried[0]),
    }
    assert (spec.load, spec.memory) == (Load(7, 300), 5 << 30)


def test_the_result_as_json(model: Path) -> None:
    found = measured(model, Played(24_000), precision=0.5).as_json()
    trials = found.pop("trials")
    assert found.pop("state").endswith(".json")
    best = max(trial["max_num_tokens"] for trial in trials if trial["fits"])
    assert found == {
        "model": str(model),
        "backend": "scripted",
        "tensor_parallel_degree": 1,
        "max_num_tokens": best,
        "recommended": best // 2,
        "highest_tried": HIGHEST,
        "requests": 128,
        "request_tokens": 3700,
        "memory_bound": None,
        "trials_of_earlier_runs": 0,
        "remarks": [],
    }
    assert {trial["reason"] for trial in trials} == {None, "std::bad_alloc"}
    assert set(trials[0]) == {"max_num_tokens", "fits", "phase", "reason", "seconds"}


@pytest.mark.parametrize("reason", ["the engine process (pid 7) is gone: it was killed by SIGSEGV", "status -6 while"])
def test_a_crash_below_a_bound_is_a_lack_of_memory_if_the_bound_is_its_cause(model: Path, reason: str) -> None:
    played = Played(HIGHEST)

    def crash(spec: TrialSpec, log_path: Path, on_report: Callable[[Report | None], None]) -> TrialResult:
        result = played(spec, log_path, on_report)
        fits = spec.memory is None or int(spec.options["option.max_num_tokens"]) <= 5000
        return result if fits else replace(result, outcome=Outcome("failed", "load", reason))

    subject = open_subject(str(model), {}, Load())
    found = Finder(subject, Settings(memory=1 << 30, precision=0.5), run=crash).measure()
    assert found.max_num_tokens is not None and 2500 < found.max_num_tokens <= 5000
    assert f"{reason}, which does not happen without the memory bound" in {attempt.reason for attempt in found.attempts}
    # Without a bound, and where it crashes without one too, it is another failure.
    with pytest.raises(DjlTrtllmError, match=reason.split()[0]):
        Finder(subject, Settings(precision=0.5), run=_crashing(played, reason)).measure()
    with pytest.raises(DjlTrtllmError, match=reason.split()[0]):
        Finder(subject, Settings(memory=2 << 30, precision=0.5), run=_crashing(played, reason)).measure()


def _crashing(played: Played, reason: str) -> RunTrial:
    def run(spec: TrialSpec, log_path: Path, on_report: Callable[[Report | None], None]) -> TrialResult:
        return replace(played(spec, log_path, on_report), outcome=Outcome("failed", "load", reason))

    return run
