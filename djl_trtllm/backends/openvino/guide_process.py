"""Tries guides with OpenVINO GenAI: `python -m djl_trtllm.backends.openvino.guide_process FD ENGINE_DIR`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from openvino_genai import Tokenizer

from djl_trtllm.backends.openvino.guide_compiler import GuideCompiler, read_vocabulary
from djl_trtllm.executor.guide_process import Judge, Verdict, reason_of, serve_judge
from djl_trtllm.request import Guide

_TOKENS = 16
_AGAIN_SECONDS = 0.25
"""For a guide whose grammar is compiled already. The engine takes that time of every sequence's first step."""
_TOKEN_SECONDS = 0.1


def judge(compiler: GuideCompiler, guide: Guide) -> str | None:
    """Why a guide cannot be used; None if it can."""
    try:
        compiler.compile(guide)
        began = time.process_time()  # other processes do not make a guide slower
        compiler.compile(guide)
        again = time.process_time() - began
        compiler.compile(guide, _TOKENS)
        of_token = (time.process_time() - began - 2 * again) / _TOKENS
    except RuntimeError as error:
        return reason_of(str(error))
    if again > _AGAIN_SECONDS:
        return f"it is too large: each sequence would stop the others for {again:.2f} seconds"
    if of_token > _TOKEN_SECONDS:
        return f"it is too complex: each token would take {of_token:.2f} seconds"
    return None


def _make_judge(engine_dir: Path) -> Judge:
    vocabulary = read_vocabulary(engine_dir)
    compiler = GuideCompiler(Tokenizer(str(engine_dir)), vocabulary)
    return lambda guide: Verdict(judge(compiler, guide), vocabulary)


if __name__ == "__main__":
    serve_judge(_make_judge, sys.argv)
