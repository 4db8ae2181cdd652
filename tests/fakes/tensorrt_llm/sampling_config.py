"""The checks of the C++ runtime: samplingConfig.cpp (@3585984b) and requestImpl.h (@04fa274f) of its executor.

`SamplingParams._get_sampling_config` makes a SamplingConfig of every request, on both backends, greedy or not. Its
constructor checks; its setters, which leave out two of the checks, are not used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_SOURCE = "/src/tensorrt_llm/cpp/tensorrt_llm/executor"
_MAX_BEAM_WIDTH = 1024
"""kernels/beamSearchKernels.h"""

_CHECKS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("top_k", "topK.value() >= 0", lambda value: value >= 0),
    ("top_p", "topP.value() > 0.f", lambda value: value > 0),
    ("top_p", "topP.value() <= 1.f", lambda value: value <= 1),
    ("temperature", "temperature.value() >= 0.f", lambda value: value >= 0),
    ("min_tokens", "minTokens.value() >= 0", lambda value: value >= 0),
    ("beam_search_diversity_rate", "beamSearchDiversityRate.value() >= 0.f", lambda value: value >= 0),
    ("repetition_penalty", "repetitionpenalty.value() > 0.f", lambda value: value > 0),
    ("length_penalty", "lengthPenalty.value() >= 0.f", lambda value: value >= 0),
    ("early_stopping", "earlyStopping.value() >= 0", lambda value: value >= 0),
    ("no_repeat_ngram_size", "noRepeatNgramSize.value() >= 0", lambda value: value >= 0),
    ("min_p", "minP.value() >= 0.f && minP.value() <= 1.0f", lambda value: 0 <= value <= 1),
)


def check_request(params: Any, max_new_tokens: int) -> None:
    """RuntimeError, as the bindings raise it."""
    width = params.best_of if params.use_beam_search else 1
    _require(0 < width <= _MAX_BEAM_WIDTH, "beamWidth > 0 && beamWidth <= kMaxBeamWidth", "samplingConfig.cpp")
    for name, condition, holds in _CHECKS:
        value = getattr(params, name, None)
        _require(value is None or holds(value), condition, "samplingConfig.cpp")
    returned = params.n if params.use_beam_search else params.best_of
    _require(width == 1 or returned <= width, "numReturnSequences.value() <= beamWidth", "samplingConfig.cpp")
    _require(max_new_tokens > 0, "mMaxNewTokens > 0", "requestImpl.h")
    if width > 1 and params.guided_decoding is not None and params.guided_decoding._kind():
        raise RuntimeError(
            f"[TensorRT-LLM][ERROR] Guided decoding does not support with beam search. ({_SOURCE}/requestImpl.h:347)"
        )


def _require(holds: bool, condition: str, file: str) -> None:
    if not holds:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {condition} ({_SOURCE}/{file}:94)")
