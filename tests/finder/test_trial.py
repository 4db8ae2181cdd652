"""One trial, in this process."""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from djl_trtllm.errors import BuildError, DjlTrtllmError
from djl_trtllm.finder import trial
from djl_trtllm.finder.load import NEW_TOKENS, Load
from djl_trtllm.finder.trial import EngineLog, Report, TrialSpec, run
from djl_trtllm.offline.options import open_offline_model
from tests.finder.helpers import model_with

LOAD = Load(4, 40)


def reports_of(model: Path, load: Load = LOAD, memory: int | None = None, **options: object) -> list[Report]:
    reports: list[Report] = []
    run(TrialSpec(str(model), dict(options), load, memory), reports.append)
    return reports


def test_a_trial_builds_loads_and_serves(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"memory_tokens": 5000})
    assert reports_of(model, max_num_tokens="5000") == [
        Report("build"),
        Report("load"),
        Report("requests", load=LOAD),
        Report("requests", done=True, load=LOAD),
    ]


def test_only_the_last_report_is_the_end(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"memory_tokens": 5000})
    assert [each.done for each in reports_of(model, max_num_tokens="5000")] == [False, False, False, True]


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


def test_an_error_of_the_system_is_reported_with_its_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plan(*_: Any) -> Any:
        raise MemoryError("no room")

    monkeypatch.setattr(trial, "open_offline_model", plan)
    assert reports_of(tmp_path) == [Report("build"), Report("build", error="MemoryError: no room")]


@pytest.mark.parametrize("phase", ["load", "requests"])
def test_the_phase_in_which_memory_runs_out_is_reported(tmp_path: Path, phase: str) -> None:
    model = model_with(tmp_path / "model", {"memory_tokens": 5000, "memory_phase": phase})
    last = reports_of(model, max_num_tokens="5001")[-1]
    assert last.phase == phase
    assert last.error is not None and "std::bad_alloc (scripted: max_num_tokens=5001 is more than 5000)" in last.error


def test_prompts_have_the_length_that_the_model_takes(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model")
    last = reports_of(model, Load(2, 9999), max_num_tokens="100")[-1]
    assert (last.done, last.load) == (True, Load(2, 4096))


def test_an_engine_process_that_dies_is_not_replaced(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"faults": [{"action": "die", "at_token": 2}]})
    last = reports_of(model)[-1]
    assert last.phase == "requests"
    assert last.error is not None and last.error.count("is gone: it was killed by SIGKILL") == 2


def test_a_request_that_fails_is_the_trials_failure(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model", {"faults": [{"action": "error", "at_token": 1}]})
    assert reports_of(model)[-1].error == "scripted error"


def test_a_configuration_that_is_wrong_fails_the_build(tmp_path: Path) -> None:
    last = reports_of(model_with(tmp_path / "model"), frobnicate="1")[-1]
    assert last.phase == "build"
    assert last.error is not None and "frobnicate is not an option" in last.error


def test_below_a_bound_the_model_is_planned_for_it(tiny_stories: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model"))
    last = reports_of(model, memory=80_000_000)[-1]
    assert last.phase in ("build", "load")
    assert last.error is not None


@pytest.mark.parametrize(
    ("line", "tokens"),
    [
        ("[MemUsageChange] Allocated 63.44 GiB for max tokens in paged KV cache (259840).", 259840),
        ("Estimated max tokens in KV cache : 352", 352),
        ("max tokens", None),
    ],
)
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


def test_the_cause_of_a_failed_build_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BuildError("it failed", cause="memory")

    monkeypatch.setattr(trial, "open_offline_model", fail)
    assert reports_of(tmp_path)[-1] == Report("build", error="it failed", cause="memory")


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


def test_a_request_that_is_never_scheduled_ends_the_trial(killed: list[tuple[int, int]]) -> None:
    reports: list[Report] = []
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

    reports: list[Report] = []
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
