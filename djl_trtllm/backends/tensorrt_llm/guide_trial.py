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


def too_large(began: float) -> str | None:
    """The problem of a guide whose compilation, which began at this `time.process_time()`, has taken too long."""
    seconds = time.process_time() - began  # other processes do not make a guide slower
    if seconds <= _COMPILE_SECONDS:
        return None
    return f"it is too large: compiling it would stop all other requests for {seconds:.0f} seconds"


def make_judge(make_trial: Callable[[str | None], Trial], tokenizer_dir: Path) -> Judge:
    """`make_trial` gets the text of the tokenizer.json, or None where there is none that it can read."""
    file = tokenizer_dir / _TOKENIZER
    try:
        return _judge(make_trial(file.read_text(encoding="utf-8") if file.is_file() else None))
    except Exception:
        print(f"{file} cannot be read for guides, which are parsed and not compiled before the engine gets them:")
        traceback.print_exc()
        return _judge(make_trial(None))


def _judge(trial: Trial) -> Judge:
    return lambda guide: Verdict(trial(guide))
