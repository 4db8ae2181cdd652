"""Sampling parameters under TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from djl_trtllm.api.dialects.lmi.dialect import CHAT_FIELDS
from djl_trtllm.api.parameters import Problems, Table
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest, Sampling

_LMI_NAMES = {"bad": "bad_words", "truncate_prompt_tokens": "truncate"}
"""Parameters that have another name in the LMI schema; ranges are those of its chat requests."""

_ROWS = (
    *("n", "best_of", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty", "early_stopping"),
    *("beam_search_diversity_rate", "no_repeat_ngram_size", "stop", "stop_token_ids", "bad", "ignore_eos"),
    *("truncate_prompt_tokens", "guided_decoding"),
)
_TABLE = Table([replace(CHAT_FIELDS.rows[_LMI_NAMES.get(name, name)], names=(name,)) for name in _ROWS])
_CHOICE = ("temperature", "top_p", "top_k")
_MOST_SEQUENCES = 1024
_DEFAULT_MAX_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams:
    """Constrains the output to exactly one of a JSON schema, a regular expression, a grammar, or any JSON."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        if len(self.given()) != 1:
            raise InvalidRequestError("guided decoding takes exactly one of json, regex, grammar and json_object")

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None and value is not False}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a prompt is continued. The names, the defaults and the rule for greedy decoding are TensorRT-LLM's.

    Greedy if and only if none of `temperature` (0 to 2), `top_p` and `top_k` is set, or `temperature` is 0, `top_p` 0
    or `top_k` 1. `max_tokens` None: as many as fit; its default is lowered to the model's limits, another number above
    them fails. `seed` None draws one for every prompt; a prompt's i-th sequence is sampled with `seed` + i.
    `best_of` (by default `n`) sequences are generated and `n` returned; if `best_of` is
    larger, the best by log-probability, the best first. `logprobs` 0 or 1 returns the log-probability of each token.
    A `stop` string ends the text and is not part of it.

    Checked when it is made: raises InvalidRequestError. Prompts that ask for what the backend lacks fail.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    max_tokens: int | None = _DEFAULT_MAX_TOKENS
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    length_penalty: float | None = None
    early_stopping: bool | int | None = None
    beam_search_diversity_rate: float | None = None
    no_repeat_ngram_size: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad: str | Sequence[str] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    guided_decoding: GuidedDecodingParams | None = None

    def __post_init__(self) -> None:
        self.template()

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.temperature == 0 or self.top_p == 0 or self.top_k == 1

    def template(self) -> GenerationRequest:
        """The request, without its prompt. Raises InvalidRequestError."""
        problems = Problems()
        values = _TABLE.read(self._given(), problems, "parameter")
        sampling = self._sampling(values, problems)
        if self.logprobs is not None and self.logprobs not in (0, 1):
            problems.unsupported.append(
                f"'logprobs' is {self.logprobs}: only the chosen token's log-probability is available, expected 0 or 1"
            )
        problems.raise_any()
        default = self.max_tokens == _DEFAULT_MAX_TOKENS
        return GenerationRequest(
            sampling=msgspec.structs.replace(sampling, max_new_tokens=0) if default else sampling,
            default_new_tokens=_DEFAULT_MAX_TOKENS if default else 0,
            stop=values.get("stop", ()),
            stop_token_ids=values.get("stop_token_ids", ()),
            logprobs=self.logprobs is not None,
            needs_logprobs=self.logprobs is not None or sampling.best_of is not None,
            truncate=values.get("truncate"),
            bad=values.get("bad", ()),
            guide=values.get("guide"),
        )

    def _given(self) -> dict[str, Any]:
        """Return the parameters that are set, in the types of JSON."""
        given = {name: getattr(self, name) for name in _ROWS if getattr(self, name) is not None}
        for name in ("stop", "stop_token_ids", "bad"):
            if isinstance(given.get(name), Sequence) and not isinstance(given[name], str):
                given[name] = list(given[name])
        if self.early_stopping is not None:
            given["early_stopping"] = bool(self.early_stopping)
        if self.guided_decoding is not None:
            given["guided_decoding"] = self.guided_decoding.given()
        if self.greedy:
            for name in _CHOICE:
                given.pop(name, None)
        return given

    def _sampling(self, values: dict[str, Any], problems: Problems) -> Sampling:
        chosen = {name: value for name, value in values.items() if name in Sampling.__struct_fields__}
        n, generated = chosen.get("n", 1), chosen.pop("best_of", chosen.get("n", 1))
        beams = generated if self.use_beam_search else 1
        if generated < n:
            problems.invalid.append(f"'best_of' is {generated}: expected at least 'n', which is {n}")
        if max(n, generated) > _MOST_SEQUENCES:
            problems.invalid.append(
                f"{max(n, generated)} sequences: expected 'n' and 'best_of' up to {_MOST_SEQUENCES}"
            )
        if self.greedy and not self.use_beam_search and max(n, generated) > 1:
            problems.invalid.append(
                "'n' or 'best_of' is above 1, and greedy decoding gives the same sequence every time: set "
                "'temperature', 'top_p' or 'top_k'"
            )
        sampling = Sampling(
            **chosen,
            do_sample=not self.greedy and beams == 1,
            beam_width=beams,
            # Without a need to choose, sequences are delivered as their tokens arrive.
            best_of=generated if beams == 1 and generated > n else None,
        )
        if 0 < sampling.max_new_tokens < sampling.min_new_tokens:
            problems.invalid.append(
                f"'min_tokens' is {sampling.min_new_tokens}: expected at most 'max_tokens', which is "
                f"{sampling.max_new_tokens}"
            )
        return sampling
