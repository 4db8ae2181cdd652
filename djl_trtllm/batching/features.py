"""What a request needs of an executor beyond plain sampling."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import NamedTuple

from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.request import GenerationRequest, GuideKind


class _Need(NamedTuple):
    """A feature, the parameter that asks for it, whether a request does, and what else can be done."""

    feature: Feature
    parameter: str
    asked: Callable[[GenerationRequest], bool]
    advice: str


def _guided(*kinds: GuideKind) -> Callable[[GenerationRequest], bool]:
    return lambda request: request.guide is not None and request.guide.kind in kinds


_NO_GUIDE = "this engine cannot hold its output to a form; on TensorRT-LLM set option.guided_decoding_backend=xgrammar"
_NEEDS = (
    _Need(
        Feature.BEAM_SEARCH,
        "'num_beams' ('beam_width')",
        lambda request: request.sampling.beam_width > 1,
        "this engine has no beam search; use 'n' and 'best_of' with sampling, or TensorRT-LLM with "
        "option.max_beam_width",
    ),
    _Need(Feature.MIN_P, "'min_p'", lambda request: request.sampling.min_p > 0, "use 'top_p'"),
    _Need(
        Feature.NO_REPEAT_NGRAM,
        "'no_repeat_ngram_size'",
        lambda request: request.sampling.no_repeat_ngram_size > 0,
        "use 'repetition_penalty'",
    ),
    _Need(
        Feature.BAD_WORDS,
        "'bad_words' ('bad_sequences')",
        lambda request: bool(request.bad),
        "this engine cannot keep words out",
    ),
    _Need(Feature.JSON, "a JSON guide", _guided(GuideKind.JSON_OBJECT, GuideKind.JSON_SCHEMA), _NO_GUIDE),
    _Need(Feature.REGEX, "a regular expression", _guided(GuideKind.REGEX), _NO_GUIDE),
    _Need(Feature.GRAMMAR, "a grammar", _guided(GuideKind.GRAMMAR), _NO_GUIDE),
    _Need(
        Feature.ADAPTERS,
        "'adapters'",
        lambda request: request.adapter is not None,
        "this model is served without LoRA adapters; on TensorRT-LLM set option.enable_lora=true",
    ),
    _Need(
        Feature.LOGPROBS,
        "'logprobs' or 'best_of'",
        lambda request: request.needs_logprobs,
        "this engine gives no log-probabilities; on a compiled TensorRT engine set "
        "option.gather_generation_logits=true",
    ),
)


def gives_logprobs(request: GenerationRequest, features: Set[Feature]) -> bool:
    """Whether a request that has a place for log-probabilities gets them from an executor with these features."""
    wanted = request.asks_logprobs or request.needs_logprobs or Feature.FREE_LOGPROBS in features
    return Feature.LOGPROBS in features and wanted


def require(request: GenerationRequest, features: Set[Feature]) -> None:
    """Raise UnsupportedParameterError, naming the parameters, for what an executor with these features cannot do."""
    missing = [
        f"{need.parameter}: {need.advice}" for need in _NEEDS if need.feature not in features and need.asked(request)
    ]
    if missing:
        raise UnsupportedParameterError(f"not supported by this backend: {'; '.join(missing)}")
