"""Runs trials, each in a clean process of its own, of which nothing is left when it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from djl_trtllm.errors import DjlTrtllmError
from djl_trtllm.finder.oom_killer import oom_kills
from djl_trtllm.finder.outcome import Failure, Outcome, Phase, classify
from djl_trtllm.finder.trial import Report, TrialSpec

_TICK_SECONDS = 1.0
_ENDING_SECONDS = 20.0
_PACKAGE = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class TrialResult:
    """`reports` are all that the trial sent, in order."""

    outcome: Outcome
    reports: tuple[Report, ...]
    seconds: float


def run_trial(spec: TrialSpec, log_path: Path, on_report: Callable[[Report | None], None]) -> TrialResult:
    """Run one trial to its end. Its output goes to `log_path`.

    `on_report` gets each report as it arrives, and None about every second. If it raises, or on Ctrl-C, the trial and
    all its processes are ended first. Raises DjlTrtllmError if no process can be started.
    """
    began, kills = time.monotonic(), oom_kills()
    reports: list[Report] = []
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


def _failure(reports: list[Report], status: int, kills: int, *, bounded: bool) -> Failure | None:
    """What is known of a trial that did not report that it is done."""
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


def _reports(descriptor: int) -> Iterator[Report | None]:
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
            yield msgspec.json.decode(line, type=Report)


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
