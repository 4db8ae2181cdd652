"""Sampling parameters under TensorRT-LLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from djl_trtllm.api import Defaults
from djl_trtllm.api.lmi import parse as lmi
from djl_trtllm.errors import InvalidRequestError
from djl_trtllm.request import GenerationRequest

_RENAMED = {"bad": "bad_words", "truncate_prompt_tokens": "truncate"}
_GUIDES = {"json": "guided_json", "regex": "guided_regex", "grammar": "guided_grammar"}
_SOME_CHAT: Mapping[str, Any] = MappingProxyType({"messages": [{"role": "user", "content": ""}]})
_DEFAULTS = Defaults(max_best_of=1024)


@dataclass(frozen=True, kw_only=True)
class GuidedDecodingParams:
    """What the output is held to: exactly one of a JSON schema, a regular expression, an EBNF grammar, any JSON."""

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False

    def parameters(self) -> dict[str, Any]:
        """As parameters of the LMI schema."""
        given = {name: getattr(self, field) for field, name in _GUIDES.items() if getattr(self, field) is not None}
        if self.json_object:
            given["response_format"] = {"type": "json_object"}
        if len(given) != 1:
            raise InvalidRequestError("guided decoding takes exactly one of json, regex, grammar and json_object")
        return given


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a prompt is continued. The names, the defaults and the rule for greedy decoding are TensorRT-LLM's.

    Greedy if and only if none of `temperature` (0 to 2), `top_p` and `top_k` is set, or `temperature` is 0, `top_p` 0
    or `top_k` 1. `max_tokens` None: as many as fit. `seed` None draws one for every prompt; a prompt's i-th sequence is
    sampled with `seed` + i. `n` sequences are returned of `best_of` (by default `n`) that are generated; if `best_of`
    is larger, the best by log-probability, the best first. `logprobs` 0 or 1 returns the log-probability of each token.
    A `stop` string ends the text and is not part of it.

    Checked when it is made: raises InvalidRequestError. What the backend lacks fails the prompts that ask for it.
    """

    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    max_tokens: int | None = 32
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
        # Chat requests of the LMI schema have TensorRT-LLM's names, its order of n sequences and its unset max_tokens.
        try:
            request = lmi.parse_payload({**_SOME_CHAT, **self.parameters()}, _DEFAULTS).request
        except InvalidRequestError as error:
            raise type(error)(str(error).removeprefix(lmi.PREFIX)) from None
        if self.greedy and not self.use_beam_search and max(self.n, self.best_of or 1) > 1:
            raise InvalidRequestError(
                "'n' or 'best_of' is above 1, and greedy decoding gives the same sequence every time: set "
                "'temperature', 'top_p' or 'top_k'"
            )
        return msgspec.structs.replace(request, messages=None)

    def parameters(self) -> dict[str, Any]:
        """As parameters of a chat request of the LMI schema."""
        fields = asdict(self) | {"do_sample": not self.greedy, "guided_decoding": None}
        given = {_RENAMED.get(name, name): value for name, value in fields.items() if value is not None}
        del given["use_beam_search"]
        for name in ("stop", "stop_token_ids", "bad_words"):
            if name in given and not isinstance(given[name], str):
                given[name] = list(given[name])
        if self.greedy:
            for name in ("temperature", "top_p", "top_k"):
                given.pop(name, None)
        if self.use_beam_search:
            given["num_beams"] = given.pop("best_of", self.n)
        if self.early_stopping is not None:
            given["early_stopping"] = bool(self.early_stopping)
        if self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": 1 if self.logprobs is True else self.logprobs}
        if self.guided_decoding is not None:
            given |= self.guided_decoding.parameters()
        return given
