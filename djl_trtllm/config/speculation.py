"""Speculative decoding: its options and the spellings of two engines as one value.

`{"method": "ngram", "num_speculative_tokens": 4}` (vLLM), `{decoding_type: NGram, max_draft_len: 4}` (TensorRT-LLM) and
`option.speculative_decoding_mode=ngram` with `option.speculative_length=4` are the same.
"""

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from djl_trtllm.config.sources import Config
from djl_trtllm.errors import ConfigError
from djl_trtllm.files import MOST_SETTINGS_BYTES, read_file


class Method(str, enum.Enum):
    """The sources of draft tokens."""

    DRAFT = "draft_model"
    NGRAM = "ngram"
    """Draft tokens from earlier text of the request: prompt lookup."""
    EAGLE3 = "eagle3"
    EAGLE = "eagle"
    MTP = "mtp"
    MEDUSA = "medusa"
    LOOKAHEAD = "lookahead"

    def __str__(self) -> str:
        return self.value


_SPELLINGS = {
    **{re.sub(r"\W|_", "", method.value): method for method in Method},
    **dict.fromkeys(("drafttarget", "drafttokensexternal"), Method.DRAFT),
    "promptlookup": Method.NGRAM,
    "lookaheaddecoding": Method.LOOKAHEAD,
}
_WITH_MODEL = (Method.DRAFT, Method.EAGLE3)
_TOKENS = 4
MOST_TOKENS = 256
"""The most draft tokens of an option, more than any engine takes in an iteration."""


@dataclass(frozen=True)
class Speculation:
    """The speculation of a model. A `method` that is no `Method` is an engine's own name; None leaves it to the engine.

    `tokens` are proposed in an iteration. `model` is the path or id of the draft, `ngram` the longest n-gram that is
    looked up, `tensor_parallel` the draft's number of GPUs; `window` and `verification` are those of lookahead
    decoding, `tree` is that of Medusa and Eagle. `extra` are fields of one engine only. `setting` names the option.
    """

    setting: str
    method: Method | str | None
    tokens: int
    model: str | None = None
    ngram: int | None = None
    tensor_parallel: int | None = None
    window: int | None = None
    verification: int | None = None
    tree: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class _Field(NamedTuple):
    """The names of a field in `option.speculative_config`, the options that are the same, and the methods with it."""

    names: tuple[str, ...]
    options: tuple[str, ...]
    of: tuple[Method, ...] = tuple(Method)


_FIELDS = {
    "method": _Field(("method", "decoding_type"), ("speculative_decoding_mode",)),
    "tokens": _Field(
        ("num_speculative_tokens", "max_draft_len", "num_nextn_predict_layers", "num_assistant_tokens"),
        ("speculative_length",),
    ),
    "model": _Field(("model", "speculative_model", "speculative_model_dir"), ("speculative_draft_model",)),
    "ngram": _Field(
        ("prompt_lookup_max", "max_matching_ngram_size", "max_ngram_size"),
        ("lookahead_ngram_size",),
        (Method.NGRAM, Method.LOOKAHEAD),
    ),
    "tensor_parallel": _Field(("draft_tensor_parallel_size",), ("draft_model_tp_size",)),
    "window": _Field(("max_window_size",), ("lookahead_window_size",), (Method.LOOKAHEAD,)),
    "verification": _Field(("max_verification_set_size",), ("lookahead_verification_set_size",), (Method.LOOKAHEAD,)),
    "tree": _Field(
        ("medusa_choices", "eagle_choices"), ("medusa_choices", "eagle_choices"), (Method.MEDUSA, Method.EAGLE)
    ),
}
_IMPLIED = {
    "speculative_draft_model": None,
    "medusa_choices": Method.MEDUSA,
    "eagle_choices": Method.EAGLE,
    "lookahead_window_size": Method.LOOKAHEAD,
    "lookahead_ngram_size": Method.LOOKAHEAD,
    "lookahead_verification_set_size": Method.LOOKAHEAD,
}
"""Options that choose a method where none is named; a draft model leaves the choice to the engine."""


def speculation_of(config: Config) -> Speculation | None:
    """Return what the options ask for, None for no speculation. Raises ConfigError with every problem found."""
    problems: list[str] = []
    found, extra = _collected(config, problems)
    problems += _wrong(config, found)
    _raise(problems)
    chosen = [name for name in _IMPLIED if getattr(config.options, name) is not None]
    named = found.pop("method", None)
    implied = [_IMPLIED[name] for name in chosen if _IMPLIED[name] is not None]
    method = _method(named) if named is not None else next(iter(implied), None)
    if named is None and not chosen and "model" not in found:
        if found.keys() - {"tokens", "tensor_parallel"} or extra:
            raise ConfigError(f"{_config(config)}: expected the method that speculates; {_EXPECTED}")
        return None
    if found.get("tokens") == 0 or named == "none":
        return None
    key = next((n for n in ("speculative_config", "speculative_decoding_mode", *chosen) if config.is_set(n)), "")
    setting = config.format_setting(key) if key else "option.speculative_config"
    model = found.get("model")
    if model is None and method in _WITH_MODEL:
        problems.append(f"{setting}: {method} needs a draft model: set option.speculative_draft_model to its files")
    if model is not None and method in (Method.NGRAM, Method.LOOKAHEAD, Method.MTP):
        problems.append(f"{setting}: {method} has no draft model: leave out {model}, or set another method")
    drafting = Method.DRAFT if method is None else method
    for name in found:
        if isinstance(drafting, Method) and drafting not in _FIELDS[name].of:
            others = " and ".join(_FIELDS[name].of)
            problems.append(f"{setting}: {drafting} has no {_FIELDS[name].names[0]}, which {others} have: leave it out")
    _raise(problems)
    found["tokens"] = found.get("tokens") or (1 if method is Method.MTP else _TOKENS)
    return Speculation(setting, method, extra=extra, **found)


def _collected(config: Config, problems: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The values of fields of `Speculation`, and the values that no such field takes."""
    found: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    said: dict[str, str] = {}
    for name, value in _object(config).items():
        own = next((each for each, (names, _, _) in _FIELDS.items() if name in names), None)
        if own is None:
            extra[name] = value
        elif own in said and _method(found[own]) != _method(value):
            problems.append(f"{_config(config)}: {said[own]} and {name} are the same: keep one")
        else:
            found[own], said[own] = value, name
    for own, (_, options, _) in _FIELDS.items():
        for name in options:
            value = getattr(config.options, name)
            if value is not None and _method(found.setdefault(own, value)) != _method(value):
                problems.append(f"{config.format_setting(name)}: another setting says {found[own]!r}; keep one")
    return found, extra


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError(problems)


def _method(text: Any) -> Any:
    """The method of a spelling; another value as it is."""
    return _SPELLINGS.get(re.sub(r"\W|_", "", text).lower(), text) if isinstance(text, str) else text


def _config(config: Config) -> str:
    return f"option.speculative_config ({config.origin('speculative_config')})"


def _wrong(config: Config, found: Mapping[str, Any]) -> list[str]:
    """Problems with the types and sizes of values."""
    kinds = {each.name: str(each.type) for each in fields(Speculation)}
    problems = []
    for name, value in found.items():
        least = 0 if name == "tokens" else 1
        if "int" in kinds[name]:
            right = isinstance(value, int) and not isinstance(value, bool) and least <= value <= MOST_TOKENS
            expected = f"a whole number from {least} to {MOST_TOKENS}"
        else:
            right, expected = name == "tree" or value is None or isinstance(value, str), "text"
        if not right:
            key = next((each for each in _FIELDS[name].options if config.is_set(each)), None)
            place = (
                f"{_config(config)}: {_FIELDS[name].names[0]}={value!r}" if key is None else config.format_setting(key)
            )
            problems.append(f"{place}: expected {expected}")
    return problems


def _object(config: Config) -> dict[str, Any]:
    """The object in `option.speculative_config`, or in the file that it names."""
    text = config.options.speculative_config
    if text is None or not text.strip():
        return {}
    where = _config(config)
    try:
        if not text.lstrip().startswith("{"):
            beside = None if config.model_dir is None else config.model_dir / text
            path = beside if beside is not None and beside.exists() else Path(text)
            where = f"{where}, {path}"
            text = read_file(path, MOST_SETTINGS_BYTES).decode()
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
            raise ValueError("YAML aliases are not read")
        value = yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where} cannot be read: {reason}; {_EXPECTED}") from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{where}: {_EXPECTED}")
    return value


_EXPECTED = (
    'expected a JSON or YAML object, or a file with one, such as {"method": "ngram", "num_speculative_tokens": 4}'
)
