"""Runs trials, each in a clean process of its own, and says what each shows: it fits, memory ran out, or it failed."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from djl_trtllm.engines.compiler import GPU_MEMORY, HOST_MEMORY
from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.trial import Phase, TrialReport, TrialSpec

_CGROUP = Path("/sys/fs/cgroup")
_VMSTAT = Path("/proc/vmstat")


def oom_kills(cgroup: Path = _CGROUP, vmstat: Path = _VMSTAT, membership: Path = Path("/proc/self/cgroup")) -> int:
    """How many processes the OOM killer has ended, in this control group or else on this machine.

    Only the difference between two calls says something. 0 where the kernel does not say.
    """
    for file in (*_events(cgroup, membership), vmstat):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.strip().isdigit():
                return int(value)
    return 0


def _events(cgroup: Path, membership: Path) -> list[Path]:
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    paths = (line.split(":", 2)[2] for line in lines if line.startswith("0::"))
    # In a container the path is often the host's, and the root is the container's group.
    return [folder / "memory.events" for path in paths for folder in (cgroup / path.lstrip("/"), cgroup)]


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
    """`phase` is the one that failed, or the last; `reason` is empty if the number fits."""

    kind: Literal["fits", "memory", "failed"]
    phase: Phase
    reason: str = ""


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
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TrialResult:
    """`reports` are all that the trial sent, in order."""

    outcome: Outcome
    reports: tuple[TrialReport, ...]
    seconds: float


def run_trial(spec: TrialSpec, log_path: Path, on_report: Callable[[TrialReport | None], None]) -> TrialResult:
    """Run one trial to its end. Its output goes to `log_path`.

    `on_report` gets each report as it arrives, and None about every second. If it raises, or on Ctrl-C, the trial and
    all its processes are ended first. Raises DjlTrtllmError if no process can be started.
    """
    began, kills = time.monotonic(), oom_kills()
    reports: list[TrialReport] = []
    with _started(spec, log_path) as (process, descriptor):
        for report in _reports(descriptor):
            if report is not None:
                reports.append(report)
            on_report(report)
        status = process.wait()
    failure = _failure(reports, status, oom_kills() - kills, bounded=spec.memory is not None)
    phase = reports[-1].phase if reports else "build"
    outcome = Outcome("fits", phase) if failure is None else classify(failure)
    return TrialResult(outcome, tuple(reports), time.monotonic() - began)


def _failure(reports: list[TrialReport], status: int, kills: int, *, bounded: bool) -> Failure | None:
    """Return the facts about a trial that did not report its end; None if it did."""
    last = reports[-1] if reports else None
    phase: Phase = "build" if last is None else last.phase
    if last is not None and last.done:
        return None
    if last is not None and last.error is not None:
        return Failure(phase, last.error, last.cause, None, max(0, kills), bounded)
    message = f"the trial was killed by {signal.Signals(-status).name}" if status < 0 else "the trial reported no end"
    return Failure(phase, message, None, status, max(0, kills), bounded)


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
                env=_environment(),
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
            _end(process)
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


def _environment() -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_PACKAGE), inherited] if inherited else [str(_PACKAGE)]),
        # The working directory may be a model's, whose files may have the names of modules.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the trial: it ends its engine and its compiler; what is left of its group is killed."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_ENDING_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
