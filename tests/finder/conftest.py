"""Models to measure, and trials that are played."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from djl_trtllm.backends.base import this_machine
from djl_trtllm.engines.hardware import Gpu, Hardware
from djl_trtllm.finder import measure
from djl_trtllm.finder.trial import Outcome, TrialReport, TrialSpec
from tests.support.models import scripted_model

LIMITS: dict[str, object] = {"option.max_input_len": 4096, "option.max_output_len": 64, "option.max_seq_len": 4160}


def model_with(directory: Path, script: dict[str, object] | None = None, /, **options: object) -> Path:
    """A scripted model whose largest number that makes a difference is 256 x 4096."""
    cache = {"option.engine_cache_dir": directory.parent / "cache"}
    return scripted_model(directory, script, **{**LIMITS, **cache, **options})


def one_gpu(memory: int | None) -> Hardware:
    """This machine with one GPU of this many bytes (None: unknown), and TensorRT-LLM 1.2.1."""
    gpus = (Gpu("NVIDIA H200", (9, 0), memory),)
    with_gpu = replace(this_machine(), gpus=gpus, driver="580.65.06", engine_backend=True)
    return replace(with_gpu, tensorrt_llm="1.2.1", tensorrt="10.13.3.9")


@dataclass
class Played:
    """Trials that run nowhere: numbers up to `bound` fit; `failing` numbers end with another failure, `reason`."""

    bound: int
    failing: Callable[[int, TrialSpec], bool] = lambda tokens, spec: False
    reason: str = "it is broken"
    interrupted: int | None = None
    """The number of trials before Ctrl-C."""
    tried: list[int] = field(default_factory=list)
    specs: list[TrialSpec] = field(default_factory=list)

    def __call__(self, spec: TrialSpec, log_path: Path, on_report: Callable[[TrialReport | None], None]) -> Outcome:
        if len(self.tried) == self.interrupted:
            raise KeyboardInterrupt
        tokens = int(spec.options["option.max_num_tokens"])
        self.tried.append(tokens)
        self.specs.append(spec)
        reports = (TrialReport("build"), TrialReport("load"), TrialReport("requests", load=spec.load))
        for report in (*reports, None):
            on_report(report)
        if self.failing(tokens, spec):
            return Outcome("failed", "load", self.reason, 0.25)
        if tokens > self.bound:
            return Outcome("memory", "requests", "std::bad_alloc", 0.25)
        return Outcome("fits", "requests", seconds=0.25)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Played:
    """Trials that fit up to 24,000 tokens, in the place of all that a measurement runs."""
    played = Played(24_000)
    monkeypatch.setattr(measure, "run_trial", played)
    return played
