"""The measurement: a binary search whose trials build, load and serve the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec

from djl_trtllm.config import Backend
from djl_trtllm.engines.cache import EngineCache
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.load import Load
from djl_trtllm.finder.outcome import Outcome, doing, is_crash
from djl_trtllm.finder.state import Attempt, State, StateFile
from djl_trtllm.finder.subject import LOWEST, Subject, open_subject
from djl_trtllm.finder.trial import Report, TrialSpec
from djl_trtllm.finder.trials import TrialResult, run_trial
from djl_trtllm.sizing.search import Search, candidates

PRECISION = 0.01
_FOLDER = "sizes"
# The engine of a trial is of no use to other machines, and a trial finds out itself whether it fits.
_IN_TRIALS = {"option.engine_cache": "", "option.strict_memory": "false"}

RunTrial = Callable[[TrialSpec, Path, Callable[[Report | None], None]], TrialResult]


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
        """Whether the largest number that can make a difference fits."""
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
class Step:
    """A trial that begins: its number from 1, how many there are at most, its `tokens`, and what is known so far."""

    number: int
    most: int
    tokens: int
    bracket: tuple[int | None, int | None]


class Listener(Protocol):
    """Gets what happens, in order."""

    def begin(self, subject: Subject, state: State, most: int) -> None: ...

    def trial(self, step: Step) -> None: ...

    def report(self, report: Report | None) -> None: ...

    def ended(self, attempt: Attempt) -> None: ...


class Silent:
    """A listener that shows nothing."""

    def begin(self, subject: Subject, state: State, most: int) -> None:
        pass

    def trial(self, step: Step) -> None:
        pass

    def report(self, report: Report | None) -> None:
        pass

    def ended(self, attempt: Attempt) -> None:
        pass


@dataclass
class Finder:
    """One measurement."""

    subject: Subject
    settings: Settings
    listener: Listener = field(default_factory=Silent)
    run: RunTrial = run_trial

    def measure(self) -> Measured:
        """Find the largest number that fits; goes on where an interrupted measurement was.

        Raises DjlTrtllmError, with the reason, if a trial fails for anything but memory.
        """
        subject, settings = self.subject, self.settings
        if settings.memory is not None and subject.plan.gpus:
            raise DjlTrtllmError(
                f"a bound of {settings.memory} bytes is for an engine in host memory, and {subject.backend} runs on "
                "GPUs, whose own memory is measured: leave --memory out"
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
            self.listener.begin(subject, state, most)
            while (tokens := search.next) is not None:
                self.listener.trial(
                    Step(len(state.attempts) + 1, len(state.attempts) + search.left, tokens, search.bracket)
                )
                attempt = self._try(tokens, state.memory, file)
                state.attempts.append(attempt)
                search = search.after(tokens, attempt.fits)
                state.complete = search.next is None
                file.write(state)
                self.listener.ended(attempt)
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

        def listen(report: Report | None) -> None:
            if report is not None and report.engine is not None and Path(report.engine).parent == cache.root:
                engines.add(Path(report.engine).name)
            self.listener.report(report)

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
    model: str, options: Mapping[str, Any], load: Load, settings: Settings, listener: Listener | None = None
) -> Measured:
    """Measure a model as it is served here with `options`. Raises DjlTrtllmError."""
    return Finder(open_subject(model, options, load), settings, listener or Silent(), run_trial).measure()
