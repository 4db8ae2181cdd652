"""What the programs that try guides share: the model's tokenizer, and how long a guide may take."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

from djl_trtllm.executor.guide_process import Judge, Verdict
from djl_trtllm.request import Guide

_TOKENIZER = "tokenizer.json"
_COMPILE_SECONDS = 5.0
"""On one core; TensorRT-LLM compiles on several, in the loop that serves all requests."""

Trial = Callable[[Guide], str | None]
"""Compiles a guide as TensorRT-LLM does; returns why it cannot be used."""


def judge_with(trial: Trial) -> Judge:
    """A judge that also refuses what takes too long."""

    def judge(guide: Guide) -> Verdict:
        began = time.process_time()  # other processes do not make a guide slower
        problem = trial(guide)
        seconds = time.process_time() - began
        if problem is None and seconds > _COMPILE_SECONDS:
            problem = f"it is too large: compiling it would stop all other requests for {seconds:.0f} seconds"
        return Verdict(problem)

    return judge


def make_judge(make_trial: Callable[[str | None], Trial], tokenizer_dir: Path) -> Judge:
    """`make_trial` gets the text of the tokenizer.json, or None where there is none that it can read."""
    file = tokenizer_dir / _TOKENIZER
    try:
        return judge_with(make_trial(file.read_text(encoding="utf-8") if file.is_file() else None))
    except Exception:
        print(f"{file} cannot be read for guides, which are parsed and not compiled before the engine gets them:")
        traceback.print_exc()
        return judge_with(make_trial(None))
