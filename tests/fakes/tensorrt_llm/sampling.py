"""SamplingParams and GuidedDecodingParams (facts §2.7): the fields of the table, with the checks of the source."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from . import settings
from .inputs import Processed


class _Explicit:
    """Remembers which fields were passed.

    `_from_table` adds the fields and their slots; the annotations are their types.
    """

    HIDDEN: ClassVar[dict[str, Any]]
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    _explicit: tuple[str, ...]
    if not TYPE_CHECKING:
        __slots__ = ("_explicit",)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        instance = object.__new__(cls)
        instance._explicit = tuple(kwargs)
        return instance

    def explicit_fields(self) -> tuple[str, ...]:
        return self._explicit


_Base = TypeVar("_Base", bound=_Explicit)


def _from_table(name: str, base: type[_Base]) -> type[_Base]:
    specified = [
        (member_name, settings.type_of(member), field(default=member["default"]))
        for member_name, member in settings.arguments(name).items()
    ]
    hidden = [(name_, Any, field(default=default, init=False, repr=False)) for name_, default in base.HIDDEN.items()]
    made = make_dataclass(name, specified + hidden, bases=(base,), kw_only=True, slots=True)
    made.__module__ = __name__
    return made


class _GuidedDecodingParams(_Explicit):
    HIDDEN: ClassVar[dict[str, Any]] = {}
    json: str | dict[str, Any] | None
    regex: str | None
    grammar: str | None
    json_object: bool
    structural_tag: str | None
    if not TYPE_CHECKING:
        __slots__ = ()

    def _validate(self) -> None:
        guides = sum(bool(getattr(self, guide.name)) for guide in fields(self))
        if guides > 1:
            raise ValueError(f"Only one guide can be used for a request, but got {guides}.")

    def _kind(self) -> tuple[str, str] | None:
        """What reaches the engine."""
        if self.json_object:
            return "JSON", ""
        if self.json is not None:
            return "JSON_SCHEMA", json.dumps(self.json) if isinstance(self.json, dict) else str(self.json)
        if self.regex is not None:
            return "REGEX", self.regex
        if self.grammar is not None:
            return "EBNF_GRAMMAR", self.grammar
        if self.structural_tag is not None:
            return "STRUCTURAL_TAG", self.structural_tag
        return None


class SamplingParamsFields(_Explicit):
    HIDDEN: ClassVar[dict[str, Any]] = {"_bad_word_ids": None, "_stop_word_ids": None}
    n: int
    best_of: int | None
    use_beam_search: bool
    temperature: float | None
    top_k: int | None
    top_p: float | None
    max_tokens: int | None
    end_id: int | None
    pad_id: int | None
    bad: str | list[str] | None
    stop: str | list[str] | None
    stop_token_ids: list[int] | None
    logprobs: int | None
    guided_decoding: _GuidedDecodingParams | None
    _bad_word_ids: list[list[int]] | None
    _stop_word_ids: list[list[int]] | None

    if not TYPE_CHECKING:
        __slots__ = ()

    def __post_init__(self) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        if self.top_k is not None and self.top_k < 0:
            raise ValueError(f"require top_k >= 0, got top_k={self.top_k}")
        if self.temperature is not None and self.temperature < 0:
            raise ValueError(f"require temperature >= 0, got temperature={self.temperature}")
        if self.best_of < self.n:
            raise ValueError(f"best_of ({self.best_of}) cannot be less than n ({self.n})")
        if self.best_of > 1 and self._greedy_decoding and not os.environ.get("TLLM_ALLOW_N_GREEDY_DECODING"):
            raise ValueError(
                "Greedy decoding in the LLM API does not allow multiple returns. Please set to best_of=1, "
                f"got best_of={self.best_of}. Please set to best_of=1 or set an environment variable "
                "TLLM_ALLOW_N_GREEDY_DECODING=1 to allow best_of > 1 under the greedy decoding."
            )

        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        self.logprobs = self.logprobs and int(self.logprobs)

    @property
    def _greedy_decoding(self) -> bool:
        if self.use_beam_search:
            return False
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.top_k == 1 or self.top_p == 0.0 or self.temperature == 0

    def _setup(self, tokenizer: Any) -> None:
        """Called by the LLM only where end_id is None."""
        if self.end_id is None:
            self.end_id = tokenizer.eos_token_id
            self.pad_id = tokenizer.pad_token_id
            if self.pad_id is None:
                self.pad_id = self.end_id
        if self.bad is not None:
            self._bad_word_ids = [tokenizer.encode(text, add_special_tokens=False) for text in _strings(self.bad)]
        if self.stop is not None:
            self._stop_word_ids = [tokenizer.encode(text, add_special_tokens=False) for text in _strings(self.stop)]

    def _words(self, kind: str) -> list[list[int]]:
        words = [[token_id] for token_id in getattr(self, f"{kind}_token_ids") or ()]
        texts = getattr(self, kind)
        if texts is None:
            return words
        ids: list[list[int]] | None = getattr(self, f"_{kind}_word_ids")
        if ids is None:
            raise RuntimeError(
                f"SamplingParams.{kind} ({texts}) is not processed by tokenizer, please call the setup method."
            )
        return words + ids

    def _get_bad_words(self) -> list[list[int]]:
        return self._words("bad")

    def _get_stop_words(self) -> list[list[int]]:
        return self._words("stop")

    def _get_stop_reasons_and_words(self) -> list[tuple[str | int, list[int]]]:
        reasons: list[str | int] = list(self.stop_token_ids or ())
        if self.stop is not None:
            reasons += _strings(self.stop)
        return list(zip(reasons, self._get_stop_words(), strict=False))


def _strings(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


GuidedDecodingParams = _from_table("GuidedDecodingParams", _GuidedDecodingParams)
settings.NAMESPACE["GuidedDecodingParams"] = GuidedDecodingParams
SamplingParams = _from_table("SamplingParams", SamplingParamsFields)
settings.NAMESPACE["SamplingParams"] = SamplingParams


# -- sampling config ---------------------------------------------------------------------------------------------------
# The checks of the C++ runtime: samplingConfig.cpp (@3585984b) and requestImpl.h (@04fa274f) of its executor.
#
# `SamplingParams._get_sampling_config` makes a SamplingConfig of every request, on both backends, greedy or not. Its
# constructor checks; its setters, which leave out two of the checks, are not used.

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
    width = params.best_of
    _require(0 < width <= _MAX_BEAM_WIDTH, "beamWidth > 0 && beamWidth <= kMaxBeamWidth", "samplingConfig.cpp")
    for name, condition, holds in _CHECKS:
        value = getattr(params, name, None)
        _require(value is None or holds(value), condition, "samplingConfig.cpp")

    _require(max_new_tokens > 0, "mMaxNewTokens > 0", "requestImpl.h")
    if width > 1 and params.guided_decoding is not None and params.guided_decoding._kind():
        raise RuntimeError(
            f"[TensorRT-LLM][ERROR] Guided decoding does not support with beam search. ({_SOURCE}/requestImpl.h:347)"
        )


def _require(holds: bool, condition: str, file: str) -> None:
    if not holds:
        raise RuntimeError(f"[TensorRT-LLM][ERROR] Assertion failed: {condition} ({_SOURCE}/{file}:94)")


# -- what goes to the worker -------------------------------------------------------------------------------------------

_CHECKPOINT_SOURCE = "lora_ckpt_source" in settings.arguments("LoRARequest")


@dataclass(slots=True)
class _LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if self.lora_path is not None and not os.path.exists(self.lora_path):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    def explicit_fields(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self))

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(slots=True)
class _LoRARequestWithSource(_LoRARequest):
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        _LoRARequest.__post_init__(self)
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source must be one of ['hf', 'nemo'], got '{self.lora_ckpt_source}'")

    def explicit_fields(self) -> tuple[str, ...]:
        explicit = _LoRARequest.explicit_fields(self)
        return tuple(name for name in explicit if name != "lora_ckpt_source" or self.lora_ckpt_source != "hf")


LoRARequest = _LoRARequestWithSource if _CHECKPOINT_SOURCE else _LoRARequest
LoRARequest.__name__ = LoRARequest.__qualname__ = "LoRARequest"


class GenerationRequest:
    id: int
    """The executor's, which sets it when it registers the request."""
    max_new_tokens: int
    """The engine's, which sets it when it takes the request."""
    drawn: int = 0
    """What chance adds to the place where it begins."""

    def __init__(
        self,
        processed: Processed,
        sampling_params: Any,
        lora_request: Any,
        streaming: bool,
        cache_salt: str | None = None,
    ) -> None:
        self.prompt_token_ids = processed.prompt_token_ids
        self.has_positions = processed.positions
        self.has_images = bool(processed.images)
        self.cache_keys = (cache_salt, *processed.hashes)
        self.sampling_params = sampling_params
        self.lora_request = lora_request
        self.streaming = streaming


class CancellingRequest:
    def __init__(self, id: int) -> None:
        self.id = id
