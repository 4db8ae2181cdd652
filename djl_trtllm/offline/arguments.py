"""The arguments of TensorRT-LLM's LLM under its names: configuration objects, and sampling parameters.

An example of the first is `LLM(..., kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.95))`. The fields of these
classes are options of this project. TensorRT-LLM's option maps say which ones: a class has a field if an option becomes
that field there. On another backend the option does what it does there.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from djl_trtllm.api.dialects.openai.dialect import CHAT_FIELDS
from djl_trtllm.api.parameters import Problems, Table
from djl_trtllm.backends.base import effects_on
from djl_trtllm.backends.effects import Derived, Passed
from djl_trtllm.config import Backend
from djl_trtllm.config.options import OPTIONS, find
from djl_trtllm.errors import ConfigError, InvalidRequestError
from djl_trtllm.request import GenerationRequest, Sampling


def _options_of(owner: str) -> dict[str, str]:
    """The fields of a class with their options. Where several options set a field, the one passed unchanged wins."""
    found: dict[str, str] = {}
    for kind in (Passed, Derived):
        for effects in (effects_on(Backend.TENSORRT), effects_on(Backend.PYTORCH)):
            for option, effect in effects.items():
                for target in effect.targets if isinstance(effect, kind) else ():
                    if target.owner == owner:
                        found.setdefault(target.name, option)
    return found


class Configuration:
    """One of TensorRT-LLM's configuration objects.

    Keyword arguments are its fields; those that are not given, or None, have their defaults. Raises ConfigError for
    names that it does not have.
    """

    _by_field: ClassVar[dict[str, str]] = {}
    _by_keyword: ClassVar[dict[str, type["Configuration"]]] = {}

    def __init_subclass__(cls) -> None:
        cls._by_field = _options_of(cls.__name__)
        # KvCacheConfig is the argument kv_cache_config.
        Configuration._by_keyword[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    def __init__(self, **fields: Any) -> None:
        problems = [self._unknown(name) for name in fields if self._option(name) is None and not _is_nested(name)]
        if problems:
            raise ConfigError(problems)
        self._fields = fields

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self._fields.items())})"

    def options(self) -> dict[str, Any]:
        """The options that its fields set, by the names of `docs/options.md` without `option.`."""
        given = {name: value for name, value in self._fields.items() if value is not None}
        nested = {name: value for name, value in given.items() if _is_nested(name)}
        own = {str(self._option(name)): value for name, value in given.items() if name not in nested}
        return own | flattened(nested)

    @classmethod
    def _option(cls, field: str) -> str | None:
        option = cls._by_field.get(field)
        if option is not None:
            return OPTIONS[option].key.removeprefix("option.")
        declared = find(f"option.{field}")
        # TensorRT-LLM has this field, and it has no effect there or here.
        return None if declared is None or not declared.option.legacy else field

    @classmethod
    def _unknown(cls, field: str) -> str:
        near = difflib.get_close_matches(field, cls._by_field, n=1)
        advice = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(cls._by_field))}"
        return f"{cls.__name__}({field}=...): there is no such field here; {advice}"


class SchedulerConfig(Configuration):
    """How requests share the engine: `capacity_scheduler_policy`, `context_chunking_policy`, ..."""


class DynamicBatchConfig(Configuration):
    """Tuning of the batch by the load, the field `dynamic_batch_config` of `SchedulerConfig`."""


class KvCacheConfig(Configuration):
    """The KV cache: `free_gpu_memory_fraction`, `max_tokens`, `max_attention_window`, ..."""


class PeftCacheConfig(Configuration):
    """The cache of LoRA adapters."""


class LoraConfig(Configuration):
    """LoRA adapters."""


class BuildConfig(Configuration):
    """The limits and features that an engine is compiled for."""


class PluginConfig(Configuration):
    """Plugins of a compiled engine, the field `plugin_config` of `BuildConfig`."""


class QuantConfig(Configuration):
    """How weights and the KV cache are quantised."""


class CalibConfig(Configuration):
    """The samples with which a quantisation is calibrated."""


class ExtendedRuntimePerfKnobConfig(Configuration):
    """Performance switches of a compiled engine."""


class CudaGraphConfig(Configuration):
    """CUDA graphs of the PyTorch backend."""


class TorchCompileConfig(Configuration):
    """torch.compile on the PyTorch backend."""


class MoeConfig(Configuration):
    """Mixture of experts on the PyTorch backend."""


def flattened(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of LLM, with the fields of configuration objects as options of their own.

    An object may also be a dictionary of its fields, or TensorRT-LLM's own. Raises ConfigError.
    """
    flat: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in _unpacked(arguments, problems):
        if name in flat and flat[name] != value:
            problems.append(f"{name} is given twice: {flat[name]!r} and {value!r}; keep one")
        flat[name] = value
    if problems:
        raise ConfigError(problems)
    return flat


def _unpacked(arguments: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, Any]]:
    for name, value in arguments.items():
        expected = Configuration._by_keyword.get(name)
        if expected is None or value is None or isinstance(value, str):
            if isinstance(value, Configuration):
                problems.append(f"{name}={value!r}: expected a value; {type(value).__name__} belongs elsewhere")
                continue
            yield name, value
            continue
        fields = value if isinstance(value, Mapping) else _set_fields(value, expected)
        if isinstance(value, expected) or fields is not None:
            yield from (value if isinstance(value, expected) else expected(**(fields or {}))).options().items()
        else:
            problems.append(f"{name}={value!r}: expected {expected.__name__}(...)")


def _set_fields(value: Any, expected: type[Configuration]) -> dict[str, Any] | None:
    """The fields that a program set in TensorRT-LLM's own object, a pydantic model of the same name."""
    if type(value).__name__ != expected.__name__ or not hasattr(value, "model_fields_set"):
        return None
    return {name: getattr(value, name) for name in value.model_fields_set}


def _is_nested(name: str) -> bool:
    return name in Configuration._by_keyword


# -- sampling parameters -----------------------------------------------------------------------------------------------

_LMI_NAMES = {"bad": "bad_words", "truncate_prompt_tokens": "truncate"}
"""Parameters that have another name in requests; ranges are those of chat requests."""

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
    or `top_k` 1. With `max_tokens` None a prompt gets as many tokens as fit. The default is lowered to the model's
    limits; another number above them is an error. With `seed` None every prompt draws a seed of its own; its i-th
    sequence is sampled with `seed` + i. `best_of` (by default `n`) sequences are generated, and the `n` best by
    log-probability are returned, the best first. `logprobs` 0 or 1 returns the log-probability of each token. A `stop`
    string ends the text and is not part of it.

    Raises InvalidRequestError when it is made with wrong values. A prompt that asks for what the backend lacks fails.
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
        """Return the parameters in the types of JSON, None where they are not set."""
        given = {name: getattr(self, name) for name in _ROWS}
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
