"""Models to measure, and trials that are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from djl_trtllm.finder import measure
from djl_trtllm.finder.outcome import Outcome
from djl_trtllm.finder.trial import Report, TrialSpec
from djl_trtllm.finder.trials import TrialResult
from tests.support.models import scripted_model

LIMITS: dict[str, object] = {"option.max_input_len": 4096, "option.max_output_len": 64, "option.max_seq_len": 4160}


def model_with(directory: Path, script: dict[str, object] | None = None, /, **options: object) -> Path:
    """A scripted model whose largest number that makes a difference is 256 x 4096."""
    cache = {"option.engine_cache_dir": directory.parent / "cache"}
    return scripted_model(directory, script, **{**LIMITS, **cache, **options})


@dataclass
class Played:
    """Trials with a known bound that run nowhere; `failing` numbers end with another failure."""

    bound: int
    failing: Callable[[int], bool] = lambda tokens: False
    interrupted: int | None = None
    """The number of trials before Ctrl-C."""
    tried: list[int] = field(default_factory=list)
    specs: list[TrialSpec] = field(default_factory=list)

    def __call__(self, spec: TrialSpec, log_path: Path, on_report: Callable[[Report | None], None]) -> TrialResult:
        if len(self.tried) == self.interrupted:
            raise KeyboardInterrupt
        tokens = int(spec.options["option.max_num_tokens"])
        self.tried.append(tokens)
        self.specs.append(spec)
        reports = (Report("build"), Report("load"), Report("requests", load=spec.load))
        for report in reports:
            on_report(report)
        on_report(None)
        if self.failing(tokens):
            outcome = Outcome("failed", "load", "it is broken")
        elif tokens > self.bound:
            outcome = Outcome("memory", "requests", "std::bad_alloc")
        else:
            outcome = Outcome("fits", "requests")
        return TrialResult(outcome, reports, 0.25)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Trials that fit up to 24,000 tokens, in the place of all that a measurement runs."""
    played = Played(24_000)
    monkeypatch.setattr(measure, "run_trial", played)
    return played
