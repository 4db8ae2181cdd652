"""Measurements for real: engine processes, compilers, a memory bound. The fake TensorRT-LLM has a model of memory."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.load import Load
from djl_trtllm.finder.measure import Finder, Measured, Settings
from djl_trtllm.finder.outcome import Phase
from djl_trtllm.finder.subject import LOWEST, open_subject
from djl_trtllm.finder.trial import TrialSpec
from djl_trtllm.finder.trials import run_trial
from djl_trtllm.sizing.search import candidates, most_trials
from tests.fakes.installation import fake_tensorrt_llm
from tests.finder.fake_machine import hardware
from tests.finder.helpers import model_with

pytestmark = pytest.mark.slow

GIB = 1 << 30
MEMORY = 24 * GIB


@pytest.mark.parametrize("phase", ["load", "requests"])
def test_the_scripted_executors_bound_is_found_exactly(tmp_path: Path, phase: str) -> None:
    bound = 1234
    limits = {"option.max_rolling_batch_size": 256, "option.max_input_len": 64, "option.max_seq_len": 128}
    model = model_with(tmp_path / "model", {"memory_tokens": bound, "memory_phase": phase}, **limits)
    subject = open_subject(str(model), {}, Load(8, 60))
    found = Finder(subject, Settings()).measure()
    assert found.max_num_tokens == bound
    assert len(found.attempts) <= most_trials(subject.highest - LOWEST + 1) == 15
    assert {attempt.phase for attempt in found.attempts if not attempt.fits} == {phase}


def tensorrt_llm(
    tiny_stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, **script: Any
) -> Path:
    model = tmp_path / "model"
    shutil.copytree(tiny_stories, model, ignore=shutil.ignore_patterns("engine"))
    (model / "serving.properties").write_text(
        f"option.backend={backend}\noption.engine_cache_dir={tmp_path / 'cache'}\n"
    )
    for name, value in fake_tensorrt_llm(tmp_path / "fake", memory=MEMORY, script=script).items():
        monkeypatch.setenv(name, value)
    return model


def measured(model: Path, precision: float = 0.1) -> Measured:
    # The fake's pynvml is for processes that are started: this one has the real one, which finds no GPU.
    subject = open_subject(str(model), {}, Load(8, 1000), hardware(MEMORY))
    return Finder(subject, Settings(precision=precision)).measure()


@pytest.mark.parametrize(
    ("backend", "phase", "memory"),
    [
        ("tensorrt", "build", {"building": 200_000, "loaded": 1000}),
        ("tensorrt", "load", {"building": 1000, "loaded": 200_000}),
        ("pytorch", "load", {"loaded": 200_000}),
        ("pytorch", "requests", {"loaded": 1000, "running": 1_000_000}),
        ("tensorrt", "requests", {"loaded": 1000, "running": 1_000_000}),
    ],
)
def test_tensorrt_llm_runs_out_of_memory_in_every_phase(
    tiny_stories: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    phase: Phase,
    memory: dict[str, int],
) -> None:
    weights = 16 * GIB
    model = tensorrt_llm(
        tiny_stories, tmp_path, monkeypatch, backend, memory={"weights": weights, "kv_cache": 131072, **memory}
    )
    found = measured(model)
    left = MEMORY - weights
    # A twentieth of what is left is not the KV cache's, and iterations have that.
    true = int(left * 0.05 / 1_000_000) if phase == "requests" else left // 200_000
    assert found.max_num_tokens is not None
    assert true / 1.12 - 1 <= found.max_num_tokens <= true
    assert len(found.attempts) <= most_trials(len(candidates(LOWEST, found.subject.highest, 0.1)))
    assert phase in {attempt.phase for attempt in found.attempts if not attempt.fits}
    # Each engine was of use to one trial only.
    assert EngineCache(tmp_path / "cache").entries() == []


def test_another_failure_of_tensorrt_llm_ends_the_search(
    tiny_stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tensorrt_llm(tiny_stories, tmp_path, monkeypatch, "tensorrt", build_error="unsupported")
    with pytest.raises(DjlTrtllmError, match=r"building the engine: .*\n?.*is not supported in TRT-LLM yet"):
        measured(model)


def peak(spec: TrialSpec, log: Path) -> int:
    """The most data that the engine process of a trial had, in bytes."""
    most = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.002):
            for child in psutil.Process().children(recursive=True):
                try:
                    if "djl_trtllm.executor.process" in child.cmdline():
                        status = Path(f"/proc/{child.pid}/status").read_text()
                        most = max(most, int(status.partition("VmData:")[2].split()[0]) * 1024)
                except (psutil.Error, OSError, IndexError, ValueError):
                    time.sleep(0.01)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert run_trial(spec, log, lambda report: None).outcome.kind == "fits"
    finally:
        over.set()
        thread.join()
    return most


def test_openvinos_bound_is_found_within_a_tenth(tiny_stories: Path, tmp_path: Path) -> None:
    """The true number is between one that fits and one that does not, in trials of their own.

    The bound is about what an engine process takes that has none. The memory of one number differs by some percent from
    run to run, with the prompts that are there when a step begins, so the outer trials may have two tries.
    """
    load = Load(16, 1024)
    options = {"max_tokens_in_paged_kv_cache": "32768", "engine_cache_dir": str(tmp_path / "cache")}

    def spec(tokens: float, memory: int | None = None) -> TrialSpec:
        return TrialSpec(str(tiny_stories), {**options, "max_num_tokens": str(int(tokens))}, load, memory)

    bound = peak(spec(10_000), tmp_path / "log")
    subject = open_subject(str(tiny_stories), options, load)
    found = Finder(subject, Settings(memory=bound, precision=0.02)).measure()
    assert found.max_num_tokens is not None and LOWEST < found.max_num_tokens < 0.9 * subject.highest
    assert len(found.attempts) <= most_trials(len(candidates(LOWEST, subject.highest, 0.02)))
    assert {attempt.phase for attempt in found.attempts if not attempt.fits} == {"requests"}

    def outcomes(tokens: float) -> Iterator[str]:
        return (run_trial(spec(tokens, bound), tmp_path / "log", lambda report: None).outcome.kind for _ in range(2))

    assert "fits" in outcomes(found.max_num_tokens * 0.9)
    assert "memory" in outcomes(found.max_num_tokens * 1.1)
