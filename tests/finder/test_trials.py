"""Trials: the requests of one, one in this process, what a failure means, and trials in processes of their own."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest

from djl_trtllm.errors import BuildError, DjlTrtllmError
from djl_trtllm.finder import trial
from djl_trtllm.finder.trial import (
    NEW_TOKENS,
    EngineLog,
    Failure,
    Outcome,
    TrialLoad,
    TrialReport,
    TrialSpec,
    classify,
    is_crash,
    prompt_limit,
    requests_of,
    run,
    run_trial,
)
from djl_trtllm.offline.llm import open_offline_model
from djl_trtllm.service.model import Model
from tests.finder.conftest import model_with
from tests.support.processes import survivors
from tests.support.tables import by_rows, by_table

# -- The requests of a trial --


@pytest.mark.parametrize(
    ("max_input_len", "max_seq_len", "tokens"),
    [(4096, 8192, 3700), (1024, 8192, 1024), (4096, 2048, 2048 - NEW_TOKENS), (4096, 4, 1)],
)
def test_prompts_are_as_long_as_the_engine_takes(max_input_len: int, max_seq_len: int, tokens: int) -> None:
    assert TrialLoad().within(max_input_len, max_seq_len) == TrialLoad(128, tokens)


@pytest.mark.parametrize(
    ("gpus", "chunked", "tokens", "limit"),
    [(1, False, 1190, 1190), (1, True, 1190, 4096), (1, False, 50_000, 4096), (0, False, 1190, 4096)],
)
def test_on_gpus_a_prompt_is_one_iteration_unless_it_is_split(
    gpus: int, chunked: bool, tokens: int, limit: int
) -> None:
    options = SimpleNamespace(enable_chunked_prefill=chunked, max_num_tokens=tokens)
    limits = SimpleNamespace(max_input_len=4096)
    assert prompt_limit(cast(Model, SimpleNamespace(options=options, limits=limits, gpus=gpus))) == limit


def test_requests_have_tokens_of_the_vocabulary_nothing_in_common_and_are_the_same_in_every_trial() -> None:
    requests = list(requests_of(TrialLoad(5, 400), 1000))
    prompts = [request.prompt_ids or [] for request in requests]
    assert [len(prompt) for prompt in prompts] == [400] * 5
    assert {token for prompt in prompts for token in prompt} <= set(range(3, 1000))
    assert len({tuple(prompt[:8]) for prompt in prompts}) == 5
    assert {request.sampling.max_new_tokens for request in requests} == {NEW_TOKENS}
    assert list(requests_of(TrialLoad(5, 400), 1000)) == requests
    assert {token for request in requests_of(TrialLoad(2, 9), 2) for token in request.prompt_ids or ()} == {3}


# -- One trial in this process --


LOAD = TrialLoad(4, 40)


def reports_of(model: Path, load: TrialLoad = LOAD, memory: int | None = None, **options: object) -> list[TrialReport]:
    reports: list[TrialReport] = []
    run(TrialSpec(str(model), dict(options), load, memory), reports.append)
    return reports


def test_a_trial_builds_loads_and_serves(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"memory_tokens": 5000})
    assert reports_of(model, max_num_tokens="5000") == [
        TrialReport("build"),
        TrialReport("load"),
        TrialReport("requests", load=LOAD),
        TrialReport("requests", done=True, load=LOAD),
    ]
    last = reports_of(model, TrialLoad(2, 9999), max_num_tokens="100")[-1]
    assert (last.done, last.load) == (True, TrialLoad(2, 4096))


@pytest.mark.parametrize(("memory", "times"), [(None, 1), (1 << 40, 2)])
def test_a_model_is_planned_once_more_below_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int | None, times: int
) -> None:
    planned: list[str] = []

    def plan(model: str, options: dict[str, Any]) -> Any:
        planned.append(model)
        return original(model, options)

    original = open_offline_model
    monkeypatch.setattr(trial, "open_offline_model", plan)
    assert reports_of(model_with(tmp_path / "model"), memory=memory)[-1].done
    assert len(planned) == times


@pytest.mark.parametrize(
    ("error", "report"),
    [
        (MemoryError("no room"), TrialReport("build", error="MemoryError: no room")),
        (BuildError("it failed", cause="memory"), TrialReport("build", error="it failed", cause="memory")),
    ],
)
def test_an_error_is_reported_with_its_class_or_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, report: TrialReport
) -> None:
    def plan(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(trial, "open_offline_model", plan)
    assert reports_of(tmp_path) == [TrialReport("build"), report]


OUT_OF_MEMORY = "std::bad_alloc (scripted: max_num_tokens=5001 is more than 5000)"


@pytest.mark.parametrize(
    ("script", "options", "phase", "error"),
    [
        ({"memory_tokens": 5000, "memory_phase": "load"}, {"max_num_tokens": "5001"}, "load", OUT_OF_MEMORY),
        ({"memory_tokens": 5000, "memory_phase": "requests"}, {"max_num_tokens": "5001"}, "requests", OUT_OF_MEMORY),
        ({"faults": [{"action": "die", "at_token": 2}]}, {}, "requests", "is gone: it was killed by SIGKILL"),
        ({"faults": [{"action": "error", "at_token": 1}]}, {}, "requests", "scripted error"),
        ({}, {"frobnicate": "1"}, "build", "frobnicate is not an option"),
    ],
)
def test_a_failure_is_reported_with_its_phase(
    tmp_path: Path, script: dict[str, object], options: dict[str, Any], phase: str, error: str
) -> None:
    last = reports_of(model_with(tmp_path / "model", script), **options)[-1]
    assert last.phase == phase and last.error is not None and error in last.error
    # An engine process that dies is not replaced: there is its death, and that it was the last.
    assert last.error.count("SIGKILL") == (2 if "SIGKILL" in error else 0)


def test_below_a_bound_the_model_is_planned_for_it(tiny_stories: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model"))
    last = reports_of(model, memory=80_000_000)[-1]
    assert last.phase in ("build", "load")
    assert last.error is not None


@by_table("line", "tokens")
def test_the_engines_log_says_how_much_its_kv_cache_holds(line: str, tokens: int | None) -> None:
    logger = logging.getLogger("djl_trtllm.executor.process")
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with EngineLog() as log:
            logger.info("%s", line)
        logger.info("Estimated max tokens in KV cache : 7")
    finally:
        logger.setLevel(level)
    assert log.kv_tokens == tokens


class PlayedRunner:
    """Answers requests with these results; `tokens` are what the statistics say, one after another."""

    def __init__(self, *results: SimpleNamespace, tokens: Iterator[int] | None = None) -> None:
        self._tokens, self._results = tokens or itertools.repeat(7), results

    @property
    def generated_tokens(self) -> int:
        return next(self._tokens)

    def run(self, requests: Iterator[object]) -> Iterator[SimpleNamespace]:
        return iter(self._results)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The signals that are sent, to nobody."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(trial, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(trial, "_STALL_SECONDS", 0.05)
    monkeypatch.setattr(os, "kill", lambda *signalled: sent.append(signalled))
    return sent


def test_a_trial_that_is_asked_to_end_has_the_status_of_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "specification", lambda: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            trial.main(["trial", "0"])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143


def test_a_request_that_is_never_scheduled_ends_the_trial(killed: list[tuple[int, int]]) -> None:
    reports: list[TrialReport] = []
    runner: Any = PlayedRunner()
    with trial._ended_if_stalled(runner, reports.append):
        (watch,) = (thread for thread in threading.enumerate() if thread.name == "trial watch")
        assert watch.daemon
        watch.join(30)
    assert [report.error for report in reports] == ["no token was generated for 0 seconds"]
    assert killed == [(os.getpid(), signal.SIGTERM)]


def test_slow_progress_does_not_end_it(killed: list[tuple[int, int]]) -> None:
    seen = threading.Event()

    def counts() -> Iterator[int]:
        yield from range(40)
        seen.set()
        yield from itertools.count(40)

    reports: list[TrialReport] = []
    runner: Any = PlayedRunner(tokens=counts())
    with trial._ended_if_stalled(runner, reports.append):
        assert seen.wait(30)
    assert (reports, killed) == ([], [])


MODEL: Any = SimpleNamespace(vocab_size=1000, tokenizer=None)


def test_a_kv_cache_that_holds_one_request_is_enough() -> None:
    log, runner = EngineLog(), PlayedRunner()
    log.kv_tokens = LOAD.tokens + NEW_TOKENS
    trial._serve(runner, LOAD, MODEL, log)  # type: ignore[arg-type]
    log.kv_tokens -= 1
    with pytest.raises(DjlTrtllmError, match=r"out of memory: 47 tokens are left .* one request has 48"):
        trial._serve(runner, LOAD, MODEL, log)  # type: ignore[arg-type]


def test_a_request_without_an_output_is_a_failure() -> None:
    runner: Any = PlayedRunner(SimpleNamespace(failure=None, sequences=(), number=3))
    with pytest.raises(DjlTrtllmError, match="request 3 has no output of at most 8 tokens"):
        trial._serve(runner, LOAD, MODEL, EngineLog())


# -- Out of memory, or something else --


FAILURES = json.loads((Path(__file__).parent / "failures.json").read_text(encoding="utf-8"))
"""Failures of TensorRT-LLM (PyTorch's worker, the C++ runtime), of the host, of builds, by signals; what they mean."""


@by_rows(("facts", "kind", "reason"), FAILURES)
def test_memory_has_run_out_if_the_kernel_the_cause_or_the_words_say_so(
    facts: dict[str, Any], kind: str, reason: str
) -> None:
    failure = msgspec.convert(facts, Failure)
    assert classify(failure) == Outcome(kind, failure.phase, reason)  # type: ignore[arg-type]


def test_a_crash_is_a_signal_of_a_program_that_went_wrong() -> None:
    assert is_crash(Outcome("failed", "load", "it was killed by SIGSEGV"))
    assert is_crash(Outcome("failed", "load", "the trial's process ended with status -6 while loading the engine"))
    assert not is_crash(Outcome("failed", "load", "it was killed by SIGKILL"))
    assert not is_crash(Outcome("memory", "load", "SIGSEGV"))


# -- Trials in processes of their own --


def outcome_of(model: Path, tokens: int = 1000) -> Outcome:
    spec = TrialSpec(str(model), {"max_num_tokens": str(tokens)}, LOAD)
    return run_trial(spec, model.parent / "trial.log", lambda report: None)


def test_a_number_fits_or_memory_runs_out(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"memory_tokens": 1000, "memory_phase": "requests"})
    reports: list[TrialReport | None] = []
    fits = run_trial(TrialSpec(str(model), {"max_num_tokens": "1000"}, LOAD), tmp_path / "log", reports.append)
    assert (fits.kind, fits.phase) == ("fits", "requests")
    assert reports[-1] == TrialReport("requests", done=True, load=LOAD) and fits.seconds > 0
    too_large = outcome_of(model, 1001)
    assert (too_large.kind, too_large.phase) == ("memory", "requests") and "std::bad_alloc" in too_large.reason


@pytest.mark.parametrize(
    ("script", "phase", "reason"),
    [
        ({"start_error": "no such device"}, "load", "no such device"),
        ({"faults": [{"action": "die"}]}, "requests", "killed by somebody else"),
    ],
    ids=["does not start", "dies"],
)
def test_what_fails_otherwise_says_why(tmp_path: Path, script: dict[str, Any], phase: str, reason: str) -> None:
    outcome = outcome_of(model_with(tmp_path / "model", script))
    assert (outcome.kind, outcome.phase) == ("failed", phase) and reason in outcome.reason
    assert reason in (tmp_path / "trial.log").read_text() or phase == "requests"


def test_a_trial_that_is_killed_has_no_result(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"steps_per_second": 1})

    def kill(report: TrialReport | None) -> None:
        if report is not None and report.phase == "requests":
            (child,) = psutil.Process().children()
            child.kill()

    spec = TrialSpec(str(model), {}, LOAD)
    outcome = run_trial(spec, tmp_path / "log", kill)
    assert (outcome.kind, outcome.reason) == (
        "failed",
        "the trial's process ended with status -9 while answering requests",
    )


@pytest.mark.parametrize("phase", ["build", "load", "requests"])
def test_after_an_interrupt_nothing_of_a_trial_is_left(tmp_path: Path, phase: str) -> None:
    model = model_with(tmp_path / "model", {"steps_per_second": 1, "start_seconds": 1})
    seen: list[psutil.Process] = []

    def interrupt(report: TrialReport | None) -> None:
        seen.extend(psutil.Process().children(recursive=True))
        if report is not None and report.phase == phase:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_trial(TrialSpec(str(model), {}, LOAD), tmp_path / "log", interrupt)
    assert seen
    assert survivors(seen) == []
    assert psutil.Process().children(recursive=True) == []


def test_the_time_goes_on_between_reports(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"start_seconds": 2.5})
    ticks = 0

    def count(report: TrialReport | None) -> None:
        nonlocal ticks
        ticks += report is None

    run_trial(TrialSpec(str(model), {}, LOAD), tmp_path / "log", count)
    assert ticks >= 1


def test_the_working_directory_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')\n")
    monkeypatch.chdir(tmp_path)
    assert outcome_of(model_with(tmp_path / "model")).kind == "fits"


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DjlTrtllmError, match="no process can be started for a trial"):
        run_trial(TrialSpec("model", {}, LOAD), tmp_path / "none" / "log", lambda report: None)
