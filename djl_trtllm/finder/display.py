"""What a measurement does while it runs: a line that is kept up to date on a terminal, lines in a log."""

from __future__ import annotations

import logging
import time

from rich.console import Console

from djl_trtllm.finder.measure import Step
from djl_trtllm.finder.outcome import doing
from djl_trtllm.finder.state import Attempt, State
from djl_trtllm.finder.subject import Subject
from djl_trtllm.finder.trial import Report
from djl_trtllm.status_line import StatusLine

_DOWNLOADS = logging.getLogger("djl_trtllm.service.model")


class Display:
    """The progress: one line that is kept up to date on a terminal, lines in a log."""

    def __init__(self, console: Console) -> None:
        self._line = StatusLine(console)
        self._began = 0.0
        self._head = self._doing = ""
        self._downloads = _Lines(self)
        self._level = logging.NOTSET

    def __enter__(self) -> Display:
        self._level = _DOWNLOADS.level
        if not _DOWNLOADS.isEnabledFor(logging.INFO):
            _DOWNLOADS.setLevel(logging.INFO)
            _DOWNLOADS.addHandler(self._downloads)
        return self

    def __exit__(self, *_: object) -> None:
        _DOWNLOADS.removeHandler(self._downloads)
        _DOWNLOADS.setLevel(self._level)
        self.stop()

    def say(self, line: str) -> None:
        """Print a line of its own."""
        self._line.say(line)

    def stop(self) -> None:
        self._line.stop()

    def begin(self, subject: Subject, state: State, most: int) -> None:
        load = subject.load
        self.say(
            f"measuring {subject.model} on {subject.backend}: max_num_tokens up to {subject.highest:,}, at most {most} "
            f"trials, each with {load.requests} requests of {load.tokens:,} tokens at a time",
        )
        for remark in subject.remarks:
            self.say(f"note: {remark}")
        if state.memory is not None:
            self.say(f"the engine process may have {state.memory / 1e9:.2f} GB of memory")
        if state.attempts:
            done = "that is the result" if state.complete else "going on"
            self.say(f"trials of an earlier run that are known: {len(state.attempts)}, {done}; --fresh forgets them")

    def trial(self, step: Step) -> None:
        self._began = time.monotonic()
        self._head = f"trial {step.number} of at most {step.most}, max_num_tokens {step.tokens:,}{_bracket(step)}"
        self._show("starting")

    def report(self, report: Report | None) -> None:
        if report is None:
            self._show(self._doing)
        elif report.error is None and not report.done:
            self._show(_doing(report))

    def ended(self, attempt: Attempt) -> None:
        self.stop()
        outcome = "fits" if attempt.fits else f"out of memory while {doing(attempt.phase)}: {attempt.reason}"
        self.say(f"max_num_tokens {attempt.tokens:,}: {outcome} ({attempt.seconds:.1f} s)")

    def _show(self, doing: str) -> None:
        self._line.show(f"{self._head}: {doing}, {time.monotonic() - self._began:.0f} s", doing)
        self._doing = doing


def _bracket(step: Step) -> str:
    fits, fails = step.bracket
    known = [f"{fits:,} fits" if fits else "", f"{fails:,} does not" if fails else ""]
    text = ", ".join(filter(None, known))
    return f" ({text})" if text else ""


def _doing(report: Report) -> str:
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
