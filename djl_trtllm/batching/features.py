"""Refuses, by name, what a request asks for and the engine does not honour.

An executor names what it honours (`Ready.features`). Everything else must have its neutral default in a request, so
that a field which an engine does not name is refused, never dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Set
from operator import attrgetter
from typing import Any

import msgspec

from djl_trtllm.errors import UnsupportedParameterError
from djl_trtllm.executor.protocol import Feature
from djl_trtllm.request import GenerationRequest, GuideKind, Sampling

_DONE_ABOVE = frozenset(
    {
        *("prompt", "prompt_ids", "messages", "template", "truncate", "sampling", "n", "best_of", "default_new_tokens"),
        *("stop", "logprobs", "asks_logprobs", "shown_tokens", "guide_from"),
    }
)
"""Fields that the server honours for every engine."""

_FEATURES = {"needs_logprobs": Feature.LOGPROBS, "adapter": Feature.ADAPTERS}
_GUIDES = {
    GuideKind.JSON_OBJECT: Feature.JSON,
    GuideKind.JSON_SCHEMA: Feature.JSON,
    GuideKind.REGEX: Feature.REGEX,
    GuideKind.GRAMMAR: Feature.GRAMMAR,
}
_PART_OF = {
    **dict.fromkeys(("temperature", "top_k", "top_p", "seed"), "do_sample"),
    **dict.fromkeys(("length_penalty", "early_stopping", "beam_search_diversity_rate"), "beam_width"),
}
"""Fields that have an effect only where another one is set."""

_NAMES = {
    "beam_width": "'num_beams' ('beam_width')",
    "bad": "'bad_words' ('bad_sequences')",
    "adapter": "'adapters'",
    "needs_logprobs": "'logprobs' or 'best_of'",
    "top_logprobs": "'top_logprobs' (in completions 'logprobs' above 1)",
    Feature.BEAM_LOGPROBS: "'logprobs' with 'num_beams'",
    Feature.JSON: "a JSON guide",
    Feature.REGEX: "a regular expression",
    Feature.GRAMMAR: "a grammar",
}
"""What clients call them, where that differs from the field."""

_NO_PENALTIES = "this engine's sampler ignores it; on TensorRT-LLM set option.sampler_type=TRTLLMSampler"
_NO_GUIDE = (
    "this engine cannot constrain its output; on TensorRT-LLM set option.guided_decoding_backend=xgrammar, on OpenVINO "
    "the engine's folder needs openvino_tokenizer.xml and openvino_detokenizer.xml: compile the model again, with a "
    "tokenizer that OpenVINO can convert (the compiler's log says if it could not)"
)
_NO_BEAM_FIELD = "this engine's sampler does not have it; leave it out"
_ADVICE = {
    **dict.fromkeys(("length_penalty", "early_stopping", "beam_search_diversity_rate"), _NO_BEAM_FIELD),
    "beam_width": "this engine has no beam search; use 'n' and 'best_of' with sampling, or TensorRT-LLM with "
    "option.max_beam_width",
    "min_p": "use 'top_p'",
    "no_repeat_ngram_size": "use 'repetition_penalty'",
    "repetition_penalty": _NO_PENALTIES,
    "presence_penalty": _NO_PENALTIES,
    "frequency_penalty": _NO_PENALTIES,
    "bad": "this engine cannot exclude words",
    "seed": "this engine's sampler ignores it; leave it out, or set option.ignored_seed=warn to have such requests "
    "answered with a warning; on TensorRT-LLM option.sampler_type=TRTLLMSampler takes seeds",
    "adapter": "this model is served without LoRA adapters; on TensorRT-LLM set option.enable_lora=true",
    "needs_logprobs": "this engine has no log-probabilities; on a compiled TensorRT engine set "
    "option.gather_generation_logits=true",
    "top_logprobs": "this engine has the chosen token's log-probability only; with beams no engine has more",
    Feature.BEAM_LOGPROBS: "this engine has no log-probabilities of beams; leave out 'logprobs' or 'num_beams'",
    Feature.JSON: _NO_GUIDE,
    Feature.REGEX: _NO_GUIDE,
    Feature.GRAMMAR: _NO_GUIDE,
}


def gives_logprobs(request: GenerationRequest, features: Set[str]) -> bool:
    """Whether an executor with these features returns log-probabilities for a request that has a place for them."""
    if request.sampling.beam_width > 1 and Feature.BEAM_LOGPROBS not in features:
        return False
    wanted = request.asks_logprobs or request.needs_logprobs or Feature.FREE_LOGPROBS in features
    return Feature.LOGPROBS in features and wanted


def require(request: GenerationRequest, features: frozenset[str]) -> None:
    """Raise UnsupportedParameterError, naming the parameters that an executor with these features does not honour."""
    missing: list[str] = [
        name for name, fields in _not_honoured(features) if all(read(request) != neutral for read, neutral in fields)
    ]
    if request.guide is not None and _GUIDES[request.guide.kind] not in features:
        missing.append(_GUIDES[request.guide.kind])
    if request.sampling.beam_width > 1 and request.needs_logprobs and Feature.BEAM_LOGPROBS not in features:
        missing.append(Feature.BEAM_LOGPROBS)
    if request.sampling.beam_width > 1 and request.top_logprobs and "top_logprobs" not in missing:
        missing.append("top_logprobs")
    if missing:
        reasons = "; ".join(_refusal(name, request.guide_from) for name in missing)
        raise UnsupportedParameterError(f"not supported by this backend: {reasons}")


@functools.lru_cache(maxsize=8)
def _not_honoured(features: frozenset[str]) -> list[tuple[str, list[tuple[attrgetter[Any], object]]]]:
    """The fields that must have their neutral value, or the field that they are a part of: by name, each with both."""
    found = []
    for struct, path in ((Sampling, "sampling."), (GenerationRequest, "")):
        neutral = msgspec.structs.asdict(struct())
        for name in neutral:
            if name in _DONE_ABOVE or name == "guide" or _FEATURES.get(name, name) in features:
                continue
            names = (name, _PART_OF[name]) if name in _PART_OF else (name,)
            found.append((name, [(attrgetter(path + each), neutral[each]) for each in names]))
    return found


def _refusal(name: str, guide_from: str | None) -> str:
    shown = _NAMES.get(name, f"'{name}'")
    if guide_from is not None and name in _GUIDES.values():
        shown = f"'{guide_from}', which needs {shown}"
    return f"{shown}: {_ADVICE[name]}" if name in _ADVICE else shown
