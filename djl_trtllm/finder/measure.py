"""The measurement: a binary search whose trials build, load and serve the model, kept in a file between runs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from djl_trtllm.config import Backend
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.errors import DjlTrtllmError, SizingError
from djl_trtllm.finder.subject import LOWEST, Subject, open_subject
from djl_trtllm.finder.trial import (
    Outcome,
    Phase,
    TrialLoad,
    TrialReport,
    TrialResult,
    TrialSpec,
    doing,
    is_crash,
    run_trial,
)
from djl_trtllm.progress import Display, LogDisplay
from djl_trtllm.sizing.machines import bytes_of

# -- the search, which does no I/O -------------------------------------------------------------------------------------

# With c candidates there are c + 1 results: each candidate, and none. A trial halves them at best, so that
# ceil(log2(c + 1)) trials are needed, and enough. A guess may come before the middle only where what is left after
# either outcome can still be found within that number.
_NEAR = 0.1
"""After a guess, the next number is this share away from it, then twice as far, and so on."""


def candidates(low: int, high: int, precision: float) -> Sequence[int]:
    """Numbers from `low` to `high`, both included, neighbours at most the share `precision` apart; 0: every number."""
    if precision <= 0:
        return range(low, high + 1)
    numbers = []
    number = low
    while number < high:
        numbers.append(number)
        number = max(number + 1, int(number * (1 + precision)))
    return [*numbers, high]


@dataclass(frozen=True)
class Search:
    """The state of a search over ascending `numbers`.

    `fitting` is the place of the largest number that is known to fit (-1: none yet), `failing` that of the smallest
    that is known not to (one after the last: none yet). `left` trials are certain to be enough. `guess` is the place
    near which the result is expected.
    """

    numbers: Sequence[int]
    fitting: int
    failing: int
    left: int
    guess: int | None = None
    tried: int = 0

    @classmethod
    def over(cls, numbers: Sequence[int], guess: int | None = None) -> Search:
        """A search that has not begun; `guess` is a number, not a place."""
        place = None if guess is None else max(bisect_right(numbers, guess) - 1, 0)
        return cls(numbers, -1, len(numbers), most_trials(len(numbers)), place)

    @property
    def next(self) -> int | None:
        """The number to try; None if the result is known."""
        place = self._place()
        return None if place is None else self.numbers[place]

    @property
    def found(self) -> int | None:
        """The largest number that is known to fit, the result once `next` is None."""
        return None if self.fitting < 0 else self.numbers[self.fitting]

    @property
    def bracket(self) -> tuple[int | None, int | None]:
        """The largest number known to fit, and the smallest known not to."""
        return self.found, None if self.failing == len(self.numbers) else self.numbers[self.failing]

    def after(self, number: int, fits: bool) -> Search:
        """The search with the outcome of a trial of one of its numbers, whether `next` named it or not."""
        place = bisect_right(self.numbers, number) - 1
        fitting = max(self.fitting, place) if fits else self.fitting
        failing = self.failing if fits else min(self.failing, place)
        left = max(self.left - 1, most_trials(failing - fitting - 1))
        return replace(self, fitting=fitting, failing=failing, left=left, tried=self.tried + 1)

    def _place(self) -> int | None:
        if self.failing - self.fitting <= 1:
            return None
        # What is left after either outcome can be found in one trial less.
        most = 1 << (self.left - 1)
        lowest = max(self.failing - most, self.fitting + 1)
        highest = min(self.fitting + most, self.failing - 1)
        return min(max(self._wanted(), lowest), highest)

    def _wanted(self) -> int:
        """Around the guess in growing steps until the result is between two trials, then the middle."""
        middle = (self.fitting + self.failing) // 2
        if self.guess is None or (self.fitting >= 0 and self.failing < len(self.numbers)):
            return middle
        if not self.tried:
            return self.guess
        near = self.numbers[self.guess] * _NEAR
        reach = bisect_right(self.numbers, self.numbers[self.guess] + near) - 1 - self.guess
        step = max(reach, 1) << (self.tried - 1)
        return self.fitting + step if self.fitting >= 0 else self.failing - step


def most_trials(numbers: int) -> int:
    """Trials that are certain to find the largest fitting one of this many numbers, or that none fits."""
    return numbers.bit_length()


_FORMAT = 1


class Attempt(msgspec.Struct, frozen=True):
    """A trial and its outcome. `reason` says why memory ran out, in `phase`."""

    tokens: int
    fits: bool
    phase: Phase
    reason: str
    seconds: float


class MeasurementState(msgspec.Struct):
    """`conditions` are what affects the result, for a reader; the file's name is their hash.

    `memory` is the bound of each engine process in bytes. `complete` once the result is known.
    """

    conditions: dict[str, Any]
    memory: int | None = None
    attempts: list[Attempt] = []
    complete: bool = False
    format: int = _FORMAT


class StateFile:
    """The state of one measurement, in `folder`."""

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._conditions = dict(conditions)
        content = json.dumps([_FORMAT, self._conditions], sort_keys=True, default=str)
        self.path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"

    @property
    def log_path(self) -> Path:
        """The log of the last trial."""
        return self.path.with_suffix(".log")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises DjlTrtllmError if another process measures the same, or if the folder cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.path.with_suffix(".lock"))
            lock.acquire(timeout=0)
        except Timeout:
            raise DjlTrtllmError(
                f"another process measures the same model with the same options ({self.path}): wait for it to end"
            ) from None
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            yield
        finally:
            lock.release()

    def read(self) -> MeasurementState:
        """The state as it was left; an empty one if there is none, or none that this version reads."""
        with suppress(OSError, msgspec.DecodeError):
            state = msgspec.json.decode(self.path.read_bytes(), type=MeasurementState)
            if state.format == _FORMAT:
                return state
        return MeasurementState(conditions=self._conditions)

    def write(self, state: MeasurementState) -> None:
        """Replace the file as a whole: at every moment it is the old state or the new one. Raises DjlTrtllmError."""
        temporary = self.path.with_suffix(".new")  # one process holds the measurement
        try:
            with temporary.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(state)))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise self._not_writable(error) from error

    def forget(self) -> None:
        """Measure anew."""
        self.path.unlink(missing_ok=True)

    def _not_writable(self, error: OSError) -> DjlTrtllmError:
        return DjlTrtllmError(
            f"the state of the measurement, {self.path}, cannot be written: {error}; set option.engine_cache_dir to a "
            "writable directory"
        )


PRECISION = 0.01
_FOLDER = "sizes"
# The engine of a trial is of no use to other machines, and a trial finds out itself whether it fits.
_IN_TRIALS = {"option.engine_cache": "", "option.strict_memory": "false"}

RunTrial = Callable[[TrialSpec, Path, Callable[[TrialReport | None], None]], TrialResult]


def load_of(requests: int | None, tokens: int | None) -> TrialLoad:
    """The load of a trial; None is the usual number. Raises SizingError."""
    usual = TrialLoad()
    for name, number in (("requests", requests), ("request_tokens", tokens)):
        if number is not None and number < 1:
            raise SizingError(f"{name}={number}: expected at least 1")
    return TrialLoad(requests or usual.requests, tokens or usual.tokens)


def memory_bound(name: str, memory: int | str | None) -> int | None:
    """Bytes of the engine process's bound, such as `8GB`; `name` is the argument's. Raises SizingError."""
    bound = None if memory is None else bytes_of(str(memory))
    if memory is not None and not bound:
        raise SizingError(f"{name} {memory}: expected the memory of an engine on the CPU in bytes, or as 8GB or 500MB")
    return bound


@dataclass(frozen=True)
class Settings:
    """How to measure. `memory` bounds the engine process, in bytes; `precision` is a share of the result.

    `precision` None: 1 %, and exactly where no engine is loaded. `fresh` forgets what an earlier run has found.
    """

    memory: int | None = None
    precision: float | None = None
    fresh: bool = False


@dataclass(frozen=True)
class Measured:
    """`max_num_tokens` is the largest number that fits; None if none does. `earlier`: trials of an interrupted run."""

    subject: Subject
    max_num_tokens: int | None
    attempts: tuple[Attempt, ...]
    memory: int | None
    earlier: int
    state: Path

    @property
    def recommended(self) -> int | None:
        """Half of the maximum: the other half is for the KV cache (the finder document's rule)."""
        return None if self.max_num_tokens is None else max(1, self.max_num_tokens // 2)

    @property
    def unbounded(self) -> bool:
        """Return whether the largest number that can make a difference fits."""
        return self.max_num_tokens == self.subject.highest

    def as_json(self) -> dict[str, Any]:
        load = self.subject.load
        return {
            "model": self.subject.model,
            "backend": self.subject.backend.value,
            "tensor_parallel_degree": self.subject.tensor_parallel,
            "max_num_tokens": self.max_num_tokens,
            "recommended": self.recommended,
            "highest_tried": self.subject.highest,
            "requests": load.requests,
            "request_tokens": load.tokens,
            "memory_bound": self.memory,
            "trials": [
                {
                    "max_num_tokens": attempt.tokens,
                    "fits": attempt.fits,
                    "phase": attempt.phase,
                    "reason": attempt.reason or None,
                    "seconds": round(attempt.seconds, 2),
                }
                for attempt in self.attempts
            ],
            "trials_of_earlier_runs": self.earlier,
            "state": str(self.state),
            "remarks": list(self.subject.remarks),
        }


@dataclass(frozen=True)
class TrialStep:
    """A trial that begins: its number from 1, how many there are at most, its `tokens`, and what is known so far."""

    number: int
    most: int
    tokens: int
    bracket: tuple[int | None, int | None]


_TRIAL = "trial"
_DOWNLOADS = logging.getLogger("djl_trtllm.service.model")


class ShownMeasurement:
    """Shows what happens in a measurement on a display, and the model's downloads while its block runs."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._began = 0.0
        self._head = self._doing = ""
        self._downloads = _Lines(display)
        self._level = logging.NOTSET

    def __enter__(self) -> ShownMeasurement:
        self._level = _DOWNLOADS.level
        if not _DOWNLOADS.isEnabledFor(logging.INFO):
            _DOWNLOADS.setLevel(logging.INFO)
            _DOWNLOADS.addHandler(self._downloads)
        return self

    def __exit__(self, *_: object) -> None:
        _DOWNLOADS.removeHandler(self._downloads)
        _DOWNLOADS.setLevel(self._level)
        self._display.end(_TRIAL)

    def begin(self, subject: Subject, state: MeasurementState, most: int) -> None:
        load = subject.load
        self._display.say(
            f"measuring {subject.model} on {subject.backend}: max_num_tokens up to {subject.highest:,}, at most {most} "
            f"trials, each with {load.requests} requests of {load.tokens:,} tokens at a time",
        )
        for remark in subject.remarks:
            self._display.say(f"note: {remark}")
        if state.memory is not None:
            self._display.say(f"the engine process may have {state.memory / 1e9:.2f} GB of memory")
        if state.attempts:
            done = "that is the result" if state.complete else "going on"
            self._display.say(
                f"trials of an earlier run that are known: {len(state.attempts)}, {done}; --fresh forgets them"
            )

    def trial(self, step: TrialStep) -> None:
        self._began = time.monotonic()
        self._head = f"trial {step.number} of at most {step.most}, max_num_tokens {step.tokens:,}{_bracket(step)}"
        self._show("starting")

    def report(self, report: TrialReport | None) -> None:
        if report is None:
            self._show(self._doing)
        elif report.error is None and not report.done:
            self._show(_doing(report))

    def ended(self, attempt: Attempt) -> None:
        self._display.end(_TRIAL)
        outcome = "fits" if attempt.fits else f"out of memory while {doing(attempt.phase)}: {attempt.reason}"
        self._display.say(f"max_num_tokens {attempt.tokens:,}: {outcome} ({attempt.seconds:.1f} s)")

    def _show(self, doing: str) -> None:
        seconds = time.monotonic() - self._began
        self._display.show(_TRIAL, f"{self._head}: {doing}, {seconds:.0f} s", phase=doing)
        self._doing = doing


def _bracket(step: TrialStep) -> str:
    fits, fails = step.bracket
    known = [f"{fits:,} fits" if fits else "", f"{fails:,} does not" if fails else ""]
    text = ", ".join(filter(None, known))
    return f" ({text})" if text else ""


def _doing(report: TrialReport) -> str:
    if report.phase == "requests" and report.load is not None:
        return f"answering {report.load.requests} requests of {report.load.tokens:,} tokens"
    return doing(report.phase)


class _Lines(logging.Handler):
    """Shows what is downloaded."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.INFO)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        self._display.say(record.getMessage())


@dataclass
class Finder:
    """One measurement."""

    subject: Subject
    settings: Settings
    shown: ShownMeasurement = field(default_factory=lambda: ShownMeasurement(LogDisplay(lambda line: None)))
    run: RunTrial = run_trial

    def measure(self) -> Measured:
        """Find the largest number that fits; goes on where an interrupted measurement was.

        Raises DjlTrtllmError, with the reason, if a trial fails for anything but memory.
        """
        subject, settings = self.subject, self.settings
        if settings.memory is not None and subject.plan.gpus:
            raise DjlTrtllmError(
                f"--memory {settings.memory} bounds the host memory of an engine, and {subject.backend} runs on GPUs, "
                "whose memory is measured as it is: leave --memory out"
            )
        precision = self._precision()
        file = StateFile(subject.config.engine_cache_dir / _FOLDER, subject.conditions(settings.memory, precision))
        with file.held():
            if settings.fresh:
                file.forget()
            state = file.read()
            if state.memory is None:
                state.memory = settings.memory or subject.default_bound()
            search = Search.over(candidates(LOWEST, subject.highest, precision), subject.guess(state.memory))
            most = search.left
            for attempt in state.attempts:
                search = search.after(attempt.tokens, attempt.fits)
            earlier = len(state.attempts)
            self.shown.begin(subject, state, most)
            while (tokens := search.next) is not None:
                self.shown.trial(
                    TrialStep(len(state.attempts) + 1, len(state.attempts) + search.left, tokens, search.bracket)
                )
                attempt = self._try(tokens, state.memory, file)
                state.attempts.append(attempt)
                search = search.after(tokens, attempt.fits)
                state.complete = search.next is None
                file.write(state)
                self.shown.ended(attempt)
        return Measured(subject, search.found, tuple(state.attempts), state.memory, earlier, file.path)

    def _precision(self) -> float:
        if self.settings.precision is not None:
            return self.settings.precision
        return 0.0 if self.subject.backend is Backend.SCRIPTED else PRECISION

    def _try(self, tokens: int, memory: int | None, file: StateFile) -> Attempt:
        spec = TrialSpec(
            model=self.subject.model,
            options={**self.subject.options, **_IN_TRIALS, "option.max_num_tokens": str(tokens)},
            load=self.subject.load,
            memory=memory,
        )
        cache = EngineCache(self.subject.config.engine_cache_dir)
        before = {entry.key for entry in cache.entries()}
        engines: set[str] = set()

        def listen(report: TrialReport | None) -> None:
            if report is not None and report.engine is not None and Path(report.engine).parent == cache.root:
                engines.add(Path(report.engine).name)
            self.shown.report(report)

        try:
            result = self.run(spec, file.log_path, listen)
            if memory is not None and is_crash(result.outcome):
                # A lack of memory if it does not happen without the bound.
                crashed, again = result, self.run(msgspec.structs.replace(spec, memory=None), file.log_path, listen)
                result = _blamed_on_the_bound(crashed) if again.outcome.kind == "fits" else crashed
        finally:
            # Engines of other trials, and of what is served, have another max_num_tokens.
            for key in engines - before:
                cache.remove(key)
        outcome = result.outcome
        if outcome.kind == "failed":
            raise DjlTrtllmError(
                f"max_num_tokens={tokens}, {doing(outcome.phase)}: {outcome.reason}\nThis is no lack of memory, so the "
                f"search stops; the trials before it are kept. Log of the trial: {file.log_path}"
            )
        return Attempt(tokens, outcome.kind == "fits", outcome.phase, outcome.reason, result.seconds)


def _blamed_on_the_bound(crashed: TrialResult) -> TrialResult:
    outcome = crashed.outcome
    reason = f"{outcome.reason.splitlines()[0]}, which does not happen without the memory bound"
    return replace(crashed, outcome=Outcome("memory", outcome.phase, reason))


def measure(
    model: str, options: Mapping[str, Any], load: TrialLoad, settings: Settings, shown: ShownMeasurement
) -> Measured:
    """Measure a model as it is served here with `options`. Raises DjlTrtllmError."""
    return Finder(open_subject(model, options, load), settings, shown, run_trial).measure()
