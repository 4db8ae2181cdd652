"""One trial, in this process."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from djl_trtllm.finder.load import Load
from djl_trtllm.finder.trial import EngineLog, Report, TrialSpec, run
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
