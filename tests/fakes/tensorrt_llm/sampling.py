"""SamplingParams and GuidedDecodingParams (facts §2.7): the fields of the table, with the checks of the source."""

from __future__ import annotations

import json
import os
from dataclasses import Field, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from . import names


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
        (member_name, names.type_of(member), field(default=member["default"]))
        for member_name, member in names.arguments(name).items()
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
    HIDDEN: ClassVar[dict[str, Any]] = {
        "_bad_word_ids": None,
        "_stop_word_ids": None,
        "_stream_interval": None,
        "_context_logits_auto_enabled": False,
        "_generation_logits_auto_enabled": False,
    }
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
    prompt_logprobs: int | None
    return_context_logits: bool
    return_generation_logits: bool
    return_perf_metrics: bool
    add_special_tokens: bool
    truncate_prompt_tokens: int | None
    guided_decoding: _GuidedDecodingParams | None
    _bad_word_ids: list[list[int]] | None
    _stop_word_ids: list[list[int]] | None
    _stream_interval: int | None
    _context_logits_auto_enabled: bool
    _generation_logits_auto_enabled: bool
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
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1:
            raise ValueError(f"truncate_prompt_tokens must be >= 1, got {self.truncate_prompt_tokens}")
        if self.guided_decoding is not None:
            self.guided_decoding._validate()
        self.logprobs = self.logprobs and int(self.logprobs)
        self.prompt_logprobs = self.prompt_logprobs and int(self.prompt_logprobs)

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
names.NAMESPACE["GuidedDecodingParams"] = GuidedDecodingParams
SamplingParams = _from_table("SamplingParams", SamplingParamsFields)
names.NAMESPACE["SamplingParams"] = SamplingParams
