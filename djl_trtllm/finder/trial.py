"""A trial: a process that builds, loads and serves a model, and what its end says: it fits, memory ran out, it failed.

`python -m djl_trtllm.finder.trial FD` is the process. The specification is the first line of standard input, and the
process ends when that is closed. FD gets a JSON line for each `TrialReport`; without a last one that says how it ended,
the process was killed.
"""

import logging
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from djl_trtllm.config import Origin
from djl_trtllm.engines.compiler import GPU_MEMORY, HOST_MEMORY, die_with_parent
from djl_trtllm.engines.hardware import bounded
from djl_trtllm.errors import BuildError, DjlTrtllmError
from djl_trtllm.executor.client import process_logger
from djl_trtllm.offline.llm import Runner, open_offline_model
from djl_trtllm.processes import child_environment, end_group, oom_kills
from djl_trtllm.request import GenerationRequest, Sampling
from djl_trtllm.service.model import Model

NEW_TOKENS = 8
_FIRST_ID = 3  # smaller ids are usually those of special tokens


class TrialLoad(msgspec.Struct, frozen=True):
    """`requests` at a time, each with a prompt of `tokens` tokens: what the finder document's tables were tested with.

    A model with smaller limits gets as long prompts as it takes.
    """

    requests: int = 128
    tokens: int = 3700

    def within(self, max_input_len: int, max_seq_len: int) -> "TrialLoad":
        """This load with prompts that these limits allow."""
        return msgspec.structs.replace(self, tokens=max(1, min(self.tokens, max_input_len, max_seq_len - NEW_TOKENS)))


def prompt_limit(model: Model) -> int:
    """The longest prompt of a prepared model: TensorRT-LLM splits prompts only with chunked prefill."""
    options, limit = model.options, model.limits.max_input_len
    unsplit = model.gpus > 0 and not options.enable_chunked_prefill
    return min(limit, options.max_num_tokens) if unsplit and options.max_num_tokens else limit


def requests_of(load: TrialLoad, vocabulary: int) -> Iterator[GenerationRequest]:
    """The requests, with prompts of random tokens, so that no two share KV cache blocks."""
    chance = random.Random(load.tokens)  # noqa: S311  # the same prompts in every trial
    last = max(_FIRST_ID, vocabulary - 1)
    for _ in range(load.requests):
        prompt = [chance.randint(_FIRST_ID, last) for _ in range(load.tokens)]
        yield GenerationRequest(prompt_ids=prompt, sampling=Sampling(max_new_tokens=NEW_TOKENS))


Phase = Literal["build", "load", "requests"]

_STALL_SECONDS = 1800.0
"""A step on a CPU may take minutes: it has as many tokens as `max_num_tokens`."""

_WATCH_SECONDS = 1.0


class TrialSpec(msgspec.Struct, frozen=True):
    """One trial: `max_num_tokens` is one of `options`. `memory` is the bound on the engine process, in bytes."""

    model: str
    options: dict[str, Any]
    load: TrialLoad
    memory: int | None = None


class TrialReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """A phase that begins, or the end: `done`, or the `error` with the class of a failed build in `cause`."""

    phase: Phase
    done: bool = False
    error: str | None = None
    cause: str | None = None
    load: TrialLoad | None = None
    engine: str | None = None
    """The directory that TensorRT-LLM loads."""


def run(spec: TrialSpec, report: Callable[[TrialReport], None]) -> None:
    """Run the trial; every failure that is expected is reported."""
    phase: Phase = "build"
    try:
        report(TrialReport(phase))
        model = open_offline_model(spec.model, spec.options)
        with bounded(spec.memory):
            if spec.memory is not None:
                # Planned once more, now that the bound is the memory there is. The compiler had all of it.
                model = open_offline_model(spec.model, spec.options)
            phase = "load"
            report(TrialReport(phase, engine=model.start.options.get("model")))
            with EngineLog() as log:
                runner = Runner(_patient(model))
        with closing(runner):
            load = spec.load.within(prompt_limit(model), model.limits.max_seq_len)
            phase = "requests"
            report(TrialReport(phase, load=load))
            with _ended_if_stalled(runner, report):
                _serve(runner, load, model, log)
        report(TrialReport(phase, done=True, load=load))
    except (DjlTrtllmError, MemoryError, OSError) as error:
        cause = error.cause if isinstance(error, BuildError) else None
        report(TrialReport(phase, error=_text_of(error), cause=cause))


def _text_of(error: BaseException) -> str:
    """The message of an error, and that of an engine's death that caused it."""
    if not isinstance(error, DjlTrtllmError):
        return f"{type(error).__name__}: {error}"
    return str(error) if error.__cause__ is None else f"{error}\n{_text_of(error.__cause__)}"


class EngineLog(logging.Handler):
    """Reads in the engine's log how many tokens its KV cache holds, in the words of C++ and of PyTorch (facts §5.2)."""

    _KV_CACHE = re.compile(r"max tokens in paged KV cache \((\d+)\)|Estimated max tokens in KV cache *: *(\d+)")

    def __init__(self) -> None:
        super().__init__()
        self.kv_tokens: int | None = None

    def __enter__(self) -> "EngineLog":
        process_logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        process_logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if (found := self._KV_CACHE.search(record.getMessage())) is not None:
            self.kv_tokens = int(found[1] or found[2])


def _patient(model: Model) -> Model:
    """The model with settings for a trial: a dead engine process is not replaced, and one step may take long."""
    patience = max(model.options.executor_hang_timeout, _STALL_SECONDS)
    trial = Origin.derived("a trial")
    return replace(model, config=model.config.replace(trial, retry_threshold=0, executor_hang_timeout=patience))


@contextmanager
def _ended_if_stalled(runner: Runner, report: Callable[[TrialReport], None]) -> Iterator[None]:
    """Report an engine that never schedules a request, and end this process: such a request has no end."""
    over = threading.Event()

    def watch() -> None:
        tokens, since = -1, time.monotonic()
        while not over.wait(_WATCH_SECONDS):
            if runner.generated_tokens != tokens:
                tokens, since = runner.generated_tokens, time.monotonic()
            elif time.monotonic() - since > _STALL_SECONDS:
                report(TrialReport("requests", error=f"no token was generated for {_STALL_SECONDS:.0f} seconds"))
                os.kill(os.getpid(), signal.SIGTERM)
                return

    thread = threading.Thread(target=watch, name="trial watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


def _serve(runner: Runner, load: TrialLoad, model: Model, log: EngineLog) -> None:
    tokens = load.tokens + NEW_TOKENS
    if log.kv_tokens is not None and log.kv_tokens < tokens:
        # TensorRT-LLM starts, and never schedules the request.
        raise DjlTrtllmError(
            f"out of memory: {log.kv_tokens} tokens are left for the KV cache, and one request has {tokens}"
        )
    vocabulary = model.vocab_size or model.tokenizer.vocab_size
    for result in runner.run(requests_of(load, vocabulary)):
        if result.failure is not None:
            raise result.failure
        if not result.sequences:
            raise DjlTrtllmError(f"request {result.number} has no output of at most {NEW_TOKENS} tokens")


def specification() -> TrialSpec:
    """The first line of standard input, read byte by byte. End of file, later, means that the parent died."""
    line = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return msgspec.json.decode(line, type=TrialSpec)


def main(arguments: list[str]) -> int:
    # The engine and the compiler end with this process, and leave nothing behind if it can end them.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    spec = specification()
    die_with_parent()
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with os.fdopen(int(arguments[1]), "wb") as pipe:

        def report(message: TrialReport) -> None:
            pipe.write(msgspec.json.encode(message) + b"\n")
            pipe.flush()

        run(spec, report)
    return 0


# -- the side that starts it -------------------------------------------------------------------------------------------

_MEMORY = (
    GPU_MEMORY.pattern,
    # PyTorch, CUDA's libraries and TensorRT-LLM; the last three: nothing is left for the KV cache (kv_cache_manager.py
    # and resource_manager.py, TensorRT-LLM #542).
    re.compile(
        r"out of memory|OutOfMemory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
        r"|Impossible to fit in any sequence in kvCache|Impossible to fit any sequence in kvCache"
        r"|maxTokensInPagedKvCache must be large enough",
        re.IGNORECASE,
    ),
    # The host's: C++, Python, glibc, PyTorch and OpenVINO; the last is this package's, when it plans.
    re.compile(
        r"bad_alloc|bad allocation|MemoryError|Cannot allocate memory|DefaultCPUAllocator"
        r"|Failed to allocate \d+ bytes|can't alloc\b|of memory are available",
        re.IGNORECASE,
    ),
)
# A thread whose stack does not fit is refused with EAGAIN, as is one above the user's limit of processes.
_NO_THREAD = re.compile(r"Resource temporarily unavailable|can't start new thread")
_CRASHED = re.compile(r"\bSIG(?:SEGV|ABRT|BUS)\b|status -(?:6|7|11)\b")
_KILLED = re.compile(r"\bSIGKILL\b|signal 9\b")


class Outcome(msgspec.Struct, frozen=True):
    """`phase` is the one that failed, or the last; `reason` is empty if the number fits; `seconds` is what it took."""

    kind: Literal["fits", "memory", "failed"]
    phase: Phase
    reason: str = ""
    seconds: float = 0.0


class Failure(msgspec.Struct, frozen=True):
    """The facts about a trial that failed.

    `cause` is the class of a failed build (`BuildError.cause`), `status` the exit status of the trial's own process if
    it ended without a report. `oom_kills` is how many processes the kernel killed for memory meanwhile. `bounded`:
    the engine process had a memory bound.
    """

    phase: Phase
    message: str
    cause: str | None = None
    status: int | None = None
    oom_kills: int = 0
    bounded: bool = False


def classify(failure: Failure) -> Outcome:
    """Return whether memory ran out. A SIGKILL is a lack of memory only if the kernel's OOM killer sent it."""
    kind: Literal["memory", "failed"] = "memory" if _is_memory(failure) else "failed"
    return Outcome(kind, failure.phase, _reason(failure, kind))


def _is_memory(failure: Failure) -> bool:
    if failure.oom_kills:
        return True
    if failure.cause is not None:
        # A build that was killed has this cause, also if a person killed it.
        killed = failure.cause == HOST_MEMORY.name and _KILLED.search(failure.message) is not None
        return failure.cause == GPU_MEMORY.name or (failure.cause == HOST_MEMORY.name and not killed)
    if any(pattern.search(failure.message) for pattern in _MEMORY):
        return True
    return failure.bounded and _NO_THREAD.search(failure.message) is not None


def _reason(failure: Failure, kind: str) -> str:
    if failure.oom_kills:
        return f"the kernel's OOM killer ended a process while {doing(failure.phase)}"
    lines = [line.strip() for line in failure.message.splitlines() if line.strip()]
    if kind == "memory":
        return next((line for line in lines if any(pattern.search(line) for pattern in _MEMORY)), failure.message)
    if failure.status is not None:
        return f"the trial's process ended with status {failure.status} while {doing(failure.phase)}"
    if _KILLED.search(failure.message):
        return f"{failure.message}\nThe kernel's OOM killer did not end it: it was killed by somebody else"
    return failure.message


def is_crash(outcome: Outcome) -> bool:
    """Return whether a process crashed: libraries do where they do not check an allocation, and for other reasons."""
    return outcome.kind == "failed" and _CRASHED.search(outcome.reason) is not None


def doing(phase: Phase) -> str:
    """Return the words for a phase: `load` is "loading the engine"."""
    return {"build": "building the engine", "load": "loading the engine", "requests": "answering requests"}[phase]


_TICK_SECONDS = 1.0
_ENDING_SECONDS = 20.0


def run_trial(spec: TrialSpec, log_path: Path, on_report: Callable[[TrialReport | None], None]) -> Outcome:
    """Run one trial to its end. Its output goes to `log_path`.

    `on_report` gets each report as it arrives, and None about every second. If it raises, or on Ctrl-C, the trial and
    all its processes are ended first. Raises DjlTrtllmError if no process can be started.
    """
    began, kills = time.monotonic(), oom_kills()
    last = TrialReport("build")
    with _started(spec, log_path) as (process, descriptor):
        for report in _reports(descriptor):
            last = report or last
            on_report(report)
        status = process.wait()
    killed, bounded = max(0, oom_kills() - kills), spec.memory is not None
    if last.done:
        outcome = Outcome("fits", last.phase)
    elif last.error is not None:
        outcome = classify(Failure(last.phase, last.error, last.cause, None, killed, bounded))
    else:
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else "reported no end"
        outcome = classify(Failure(last.phase, f"the trial {end}", None, status, killed, bounded))
    return msgspec.structs.replace(outcome, seconds=time.monotonic() - began)


@contextmanager
def _started(spec: TrialSpec, log_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = os.pipe()
    try:
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "djl_trtllm.finder.trial", str(theirs)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs],
                start_new_session=True,
                env=child_environment(),
            )
    except OSError as error:
        os.close(ours)
        raise DjlTrtllmError(f"no process can be started for a trial: {error}") from error
    finally:
        os.close(theirs)
    assert process.stdin is not None
    # The trial is killed when this pipe closes, as it does when this process is killed: it stays open until the end.
    with closing(process.stdin):
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(spec) + b"\n")
                process.stdin.flush()
            yield process, ours
        finally:
            end_group(process, _ENDING_SECONDS)
            os.close(ours)


def _reports(descriptor: int) -> Iterator[TrialReport | None]:
    """Reports until the trial has closed its end; None about every second."""
    waiting = b""
    while True:
        if not select.select([descriptor], [], [], _TICK_SECONDS)[0]:
            yield None
            continue
        data = os.read(descriptor, 65536)
        if not data:
            return
        *lines, waiting = (waiting + data).split(b"\n")
        for line in lines:
            yield msgspec.json.decode(line, type=TrialReport)


# MPI starts this module again for every further GPU.
if __name__ == "__main__":
    sys.exit(main(sys.argv))
