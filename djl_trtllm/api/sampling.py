"""The parameters that dialects share: sampling and guides, and how they become a `GenerationRequest`.

Targets are the field names of `Sampling` and `GenerationRequest`. Ranges are DJL's if it documents them, otherwise
TGI's; `top_k` -1 means 0, as in vLLM.
"""

import re
from collections.abc import Callable
from typing import Any

import orjson

from djl_trtllm.api import parameters as kinds
from djl_trtllm.api.parameters import Kind, Parameter, Problems, show
from djl_trtllm.request import FIELDS, GREEDY_BELOW, GenerationRequest, Guide, GuideKind, PartOf, Sampling

# The parameters for guided decoding of several APIs, all parsed into a `Guide`.
#
# TGI: `grammar` = `{"type": "json" | "regex", "value": ...}`. vLLM: `guided_json`, `guided_regex`, `guided_choice`,
# `guided_grammar`, since 0.12 `structured_outputs` = an object with one of the same.
# OpenAI: `response_format` = `{"type": "text" | "json_object" | "json_schema", "json_schema": ...}`.
# TensorRT-LLM: `guided_decoding` = an object with one of `json`, `regex`, `grammar` and `json_object`.
# SGLang: `structural_tag`, which is a member of the objects above, too, and a type of `response_format`.
#
# Size and nesting are limited: engines compile guides with recursive functions, whose time grows faster than the guide.


_MOST_CHARACTERS = 65_536
"""Limits the time that the engine needs to compile a grammar."""

_MOST_CHOICES = 64
_MOST_LEVELS = 64
"""The most levels of a guide: hundreds take minutes to compile, thousands overflow the engine's stack."""
_TAG = GuideKind.STRUCTURAL_TAG.value
_TOO_DEEP = f" (it is nested deeper than {_MOST_LEVELS} levels)"
_CLASS = r"\\.|\[[^\]\\]*(?:\\.[^\]\\]*)*\]?"
_REGEX_PARTS = re.compile(rf"{_CLASS}|[()]", re.DOTALL)
_GRAMMAR_PARTS = re.compile(rf'{_CLASS}|"[^"\\]*(?:\\.[^"\\]*)*"?|[()]', re.DOTALL)
"""Parentheses, and what may have some that do not nest: escapes, character classes, strings."""


def read_schema(value: Any, strict: Any = None) -> Guide:
    """A JSON schema, as an object or as text. Raises ValueError with a hint."""
    if strict is not None and type(strict) is not bool:
        raise ValueError(" (strict is true or false)")
    return Guide(GuideKind.JSON_SCHEMA, _as_json(_object(value, "schema")), strict is True)


def read_structural_tag(value: Any) -> Guide:
    """A structural tag of xgrammar, as an object or as text, also in the older form. Raises ValueError with a hint."""
    given = _object(value, "structural tag")
    members = {name: item for name, item in given.items() if name != "type"}
    if members.keys() == {"structures", "triggers"}:
        members = {"format": _triggered_tags(**members)}
    if members.keys() != {"format"} or given.get("type", _TAG) != _TAG or type(members["format"]) is not dict:
        raise ValueError(' (a structural tag has a "format", or "structures" and "triggers")')
    return Guide(GuideKind.STRUCTURAL_TAG, _as_json({"type": _TAG, **members}))


def _triggered_tags(structures: Any, triggers: Any) -> dict[str, Any]:
    names = {"begin", "schema", "end"}
    if type(structures) is not list or not all(type(each) is dict and each.keys() == names for each in structures):
        raise ValueError(' ("structures" is a list of objects with "begin", "schema" and "end")')
    tags = [
        {
            "type": "tag",
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": each["end"],
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _object(value: Any, what: str) -> dict[str, Any]:
    """An object, or the one that a text has."""
    if type(value) is str:
        _require_short(value)
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f" (the {what} is not JSON: {error})") from None
    if type(value) is not dict:
        raise ValueError(f" (the {what} has to be an object)")
    return value


def _as_json(value: dict[str, Any]) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # it gives up at 254 levels
        raise ValueError(_TOO_DEEP) from None
    _require_short(text)
    if _levels(value) > _MOST_LEVELS:
        raise ValueError(_TOO_DEEP)
    return text


def _levels(value: dict[str, Any]) -> int:
    """The number of nested levels of lists and objects, counted no further than the limit."""
    levels = 0
    inner: list[Any] = [value]
    while inner and levels <= _MOST_LEVELS:
        inner = [
            item
            for outer in inner
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        levels += 1
    return levels


def _read_text(value: Any, kind: GuideKind, what: str, parts: re.Pattern[str]) -> Guide:
    """A guide that is a text, whose parentheses are nested no deeper than the limit."""
    if type(value) is not str or not value:
        raise ValueError(f" ({what} is a string)")
    _require_short(value)
    depth = 0
    for part in parts.findall(value):
        depth += (part == "(") - (part == ")")
        if depth > _MOST_LEVELS:
            raise ValueError(_TOO_DEEP)
    return Guide(kind, value)


def _regex(value: Any) -> Guide:
    return _read_text(value, GuideKind.REGEX, "a regular expression", _REGEX_PARTS)


def _grammar(value: Any) -> Guide:
    return _read_text(value, GuideKind.GRAMMAR, "a grammar", _GRAMMAR_PARTS)


def _choice(value: Any) -> Guide:
    valid = type(value) is list and 0 < len(value) <= _MOST_CHOICES
    if not valid or not all(type(item) is str and item for item in value):
        raise ValueError("")
    _require_short("|".join(value))
    text = "(" + "|".join(re.escape(item) for item in value) + ")"
    _require_short(text)
    return Guide(GuideKind.REGEX, text)


def _json_object(value: Any) -> Guide:
    if value is not True:
        raise ValueError("")
    return Guide(GuideKind.JSON_OBJECT)


def _require_short(text: str) -> None:
    """Raise ValueError, before anything is done with the text of a guide, if it is too long."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f" (it has {len(text)} characters, at most {_MOST_CHARACTERS} are accepted)")


def _tgi_grammar(value: Any) -> Guide:
    if type(value) is not dict or value.keys() - {"type", "value"} or value.get("type") not in ("json", "regex"):
        raise ValueError("")
    return read_schema(value.get("value")) if value["type"] == "json" else _regex(value.get("value"))


def read_response_format(value: Any) -> Guide | None:
    kind = value.get("type") if type(value) is dict else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(GuideKind.JSON_OBJECT)
    if kind == "json_schema":
        described = value.get("json_schema", value)  # in the API of responses, the members stand beside the type
        if type(described) is dict and ("schema" in described or described is value):
            return read_schema(described.get("schema"), described.get("strict"))
        return read_schema(described)
    if kind == _TAG:
        return read_structural_tag(value)
    if kind in ("json", "regex"):  # TGI takes its grammars here as well
        return _tgi_grammar(value)
    raise ValueError("")


_READERS: dict[str, Callable[[Any], Guide]] = {
    "json": read_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    _TAG: read_structural_tag,
}
"""The members of `structured_outputs`."""


def _one_of(*names: str) -> Kind:
    """An object with one of these members; a member that is null or false is not given."""

    def read(value: Any) -> Guide:
        given = {name: item for name, item in value.items() if item not in (None, False)} if type(value) is dict else {}
        if len(given) != 1 or not given.keys() <= {*names}:
            raise ValueError("")
        ((name, item),) = given.items()
        return _READERS[name](item)

    *most, last = (f'"{name}"' for name in names)
    schema = {"type": "object", "properties": {name: {} for name in names}}
    return Kind(f"an object with one of {', '.join(most)} and {last}", read, schema)


_TEXT = {"type": "string", "minLength": 1, "maxLength": _MOST_CHARACTERS}
_SCHEMA = {"anyOf": [{"type": "object"}, {"type": "string", "minLength": 2}], "description": "A JSON schema."}
_TGI_GRAMMAR = {
    "type": "object",
    "properties": {"type": {"enum": ["json", "regex"]}, "value": {"anyOf": [{"type": "object"}, _TEXT]}},
    "required": ["type", "value"],
    "additionalProperties": False,
}
_RESPONSE_FORMAT = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", _TAG, "json", "regex"]}, "json_schema": {}},
    "required": ["type"],
}
_CHOICES = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": _MOST_CHOICES}


def _guide(name: str, kind: Kind, *needs: GuideKind) -> Parameter:
    return Parameter((name,), kind, "guide", needs=needs)


GUIDES = (
    _guide(
        "grammar",
        Kind('{"type": "json" or "regex", "value": ...}', _tgi_grammar, _TGI_GRAMMAR),
        GuideKind.JSON_SCHEMA,
        GuideKind.REGEX,
    ),
    _guide("guided_json", Kind("a JSON schema, as an object or as text", read_schema, _SCHEMA), GuideKind.JSON_SCHEMA),
    _guide("guided_regex", Kind("a regular expression", _regex, _TEXT), GuideKind.REGEX),
    _guide(
        "guided_choice",
        Kind(f"a list of up to {_MOST_CHOICES} strings, none of them empty", _choice, _CHOICES),
        GuideKind.REGEX,
    ),
    _guide("guided_grammar", Kind("an EBNF grammar", _grammar, _TEXT), GuideKind.GRAMMAR),
    _guide(
        "response_format",
        Kind(
            '{"type": "text", "json_object", "json_schema" or "structural_tag"}, with "json_schema" or "format"',
            read_response_format,
            _RESPONSE_FORMAT,
        ),
        GuideKind.JSON_SCHEMA,
    ),
    _guide(
        _TAG,
        Kind("a structural tag, as an object or as text", read_structural_tag, {"anyOf": _SCHEMA["anyOf"]}),
        GuideKind.STRUCTURAL_TAG,
    ),
    _guide("guided_decoding", _one_of("json", "regex", "grammar", "json_object", _TAG), *GuideKind),
    _guide("structured_outputs", _one_of(*_READERS), *GuideKind),
)
"""Rows for the parameter tables."""


_MOST_SEQUENCES = 16
"""The most sequences of one request, `best_of` and beams included."""
_SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)
_COMPARED = ("n", "best_of", "beam_width", "max_new_tokens")
_GREEDY = {"top_k": 1}
"""Values that do not imply sampling either: the most likely token is always the next."""
_IMPLY_NOTHING = {
    each.name: (each.neutral, _GREEDY.get(each.name))
    for each in FIELDS.values()
    if each.trait.part_of == PartOf("do_sample", implied=True)
}
"""The fields that imply sampling, and their values that do not."""

MOST_TOKENS = 2**31 - 1
"""No request generates more tokens than this; the model's own limits are checked after tokenising."""


def _read_top_k(value: object) -> int:
    count: int = kinds.integer(-1, MOST_TOKENS).read(value)
    return max(count, 0)


_TOP_K = Kind(
    f"an integer from 0 to {MOST_TOKENS}, 0 for the whole vocabulary",
    _read_top_k,
    {"type": "integer", "minimum": -1, "maximum": MOST_TOKENS},
)


def _read_adapter(value: object) -> str | None:
    names = value if type(value) is list else [value]
    if len(names) > 1:
        raise ValueError(" (a request is one prompt, and has one adapter)")
    return kinds.TEXT.read(names[0]) or None if names else None


_ADAPTER = Kind(
    "the name of an adapter, or a list of one",
    _read_adapter,
    {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 1}]},
)
ADAPTER = (Parameter(("adapters", "adapter_id"), _ADAPTER, "adapter"),)

_MOST_BIASES = 4096
_MOST_DIGITS = 9
_LONGEST_SALT = 256


def _read_bias(value: object) -> tuple[tuple[int, float], ...]:
    if type(value) is not dict or len(value) > _MOST_BIASES:
        raise ValueError("")
    bias = kinds.number(-100, 100)
    return tuple(sorted((_token_of(key), bias.read(item)) for key, item in value.items()))


def _token_of(key: str) -> int:
    if not key.isascii() or not key.isdecimal() or len(key) > _MOST_DIGITS:
        raise ValueError(f" ({show(key)} is no token id)")
    if str(int(key)) != key:
        raise ValueError(f" ({show(key)} is token {int(key)}: write it without leading zeros)")  # it may be there twice
    return int(key)


_BIAS = Kind(
    f"an object of up to {_MOST_BIASES} token ids, each with a number from -100 to 100",
    _read_bias,
    {
        "type": "object",
        "propertyNames": {"pattern": f"^(0|[1-9][0-9]{{0,{_MOST_DIGITS - 1}}})$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "maxProperties": _MOST_BIASES,
    },
)


def _read_salt(value: object) -> str:
    if type(value) is not str or not 0 < len(value) <= _LONGEST_SALT:
        raise ValueError("")
    return value


_SALT = Kind(
    f"a string of 1 to {_LONGEST_SALT} characters",
    _read_salt,
    {"type": "string", "minLength": 1, "maxLength": _LONGEST_SALT},
)
MOST_PROMPT_LOGPROBS = 20
_MOST_BEAMS = 64

SAMPLING = (
    Parameter(("do_sample",), kinds.BOOLEAN, "do_sample"),
    Parameter(("top_k",), _TOP_K, "top_k"),
    Parameter(("top_p",), kinds.number(0, 1, above=True), "top_p"),
    Parameter(("repetition_penalty",), kinds.number(0, above=True), "repetition_penalty"),
    Parameter(("presence_penalty",), kinds.number(-2, 2), "presence_penalty"),
    Parameter(("frequency_penalty",), kinds.number(-2, 2), "frequency_penalty"),
    Parameter(("seed",), kinds.integer(0, 2**64 - 1), "seed"),
    Parameter(("n",), kinds.integer(1), "n"),
    Parameter(("best_of",), kinds.integer(1), "best_of", needs=("needs_logprobs",)),
    Parameter(("min_new_tokens", "min_length", "min_tokens"), kinds.integer(0, MOST_TOKENS), "min_new_tokens"),
    Parameter(("stop_sequences", "stop"), kinds.STRINGS, "stop", union=True),
    Parameter(("stop_token_ids",), kinds.TOKEN_IDS, "stop_token_ids"),
    Parameter(("ignore_eos_token", "ignore_eos"), kinds.BOOLEAN, "ignore_eos"),
    Parameter(("truncate", "truncate_prompt_tokens"), kinds.integer(1, MOST_TOKENS), "truncate"),
    Parameter(("min_p",), kinds.number(0, 1), "min_p"),
    Parameter(("no_repeat_ngram_size",), kinds.integer(0, MOST_TOKENS), "no_repeat_ngram_size"),
    Parameter(("bad_sequences", "bad_words"), kinds.STRINGS_OR_NONE, "bad", union=True),
    Parameter(("num_beams", "beam_width"), kinds.integer(1, _MOST_BEAMS), "beam_width"),
    Parameter(("length_penalty",), kinds.number(0, 10), "length_penalty"),
    Parameter(("early_stopping",), kinds.BOOLEAN, "early_stopping"),
    Parameter(("beam_search_diversity_rate",), kinds.number(0, 10), "beam_search_diversity_rate"),
    Parameter(("logit_bias",), _BIAS, "logit_bias"),
    Parameter(("cache_salt",), _SALT, "cache_salt"),
    *GUIDES,
)

OWN_SAMPLING = tuple(
    row
    for row in SAMPLING
    if row.target in (*Sampling.__struct_fields__, "logit_bias", "cache_salt")
    and row.names[0] not in ("n", "best_of", "num_beams", "beam_width")
)
"""The sampling parameters of the server in an API that has none of its own."""


def _read_priority(value: object) -> int:
    return -1 if kinds.integer(0, MOST_TOKENS).read(value) else 0


PRIORITY = (
    Parameter(
        ("priority",),
        Kind(
            "an integer of at least 0; those above it go behind other requests (a request cannot go before others; a "
            "gateway can let it, with option.priority_header)",
            _read_priority,
            {"type": "integer", "minimum": 0, "maximum": MOST_TOKENS},
        ),
        "priority",
    ),
)
"""vLLM's `priority`: requests with higher numbers go later."""

NOT_HONOURED = (
    Parameter(("top_n_tokens",), neutral=(0,), advice="tokens carry the chosen token's log-probability only"),
    Parameter(("prompt_logprobs",), neutral=(0, False)),
    Parameter(("typical_p",), neutral=(1,), advice="use 'top_p'"),
    Parameter(("watermark",), neutral=(False,)),
    Parameter(("cached_prompt",), advice="equal prompt beginnings are reused by themselves (prefix caching)"),
    Parameter(("include_stop_str_in_output",), neutral=(False,)),
    Parameter(("skip_special_tokens",), neutral=(True,)),
    Parameter(("spaces_between_special_tokens",), neutral=(True,)),
)


def read_sampling(values: dict[str, Any], problems: Problems, *, ranked: bool = False) -> Sampling:
    """The sampling of a request from what `Table.read` found in it.

    A request without `do_sample` samples if it sets a field that implies it: `temperature` (not 1), `top_k` (above 1),
    `top_p` (below 1), `min_p` (above 0). A temperature below `GREEDY_BELOW` is greedy. `ranked`: the response has the
    best sequence first. A dialect puts its own number of new tokens, for requests that give none, into `values` as
    `default_new_tokens`.
    """
    chosen = {name: value for name, value in values.items() if name in _SAMPLING_FIELDS}
    if "do_sample" not in chosen:
        chosen["do_sample"] = any(value not in _IMPLY_NOTHING.get(name, (value,)) for name, value in chosen.items())
    if chosen.get("temperature", 1.0) < GREEDY_BELOW:
        # At such a temperature, sampling always takes the most likely token.
        del chosen["temperature"]
        chosen["do_sample"] = False
    n = chosen.setdefault("n", 1)
    beams = chosen.get("beam_width", 1)
    names = {name: name for name in _COMPARED} | problems.sent
    if beams > 1 and chosen.get("best_of", beams) != beams:
        problems.invalid.append(
            f"'{names['beam_width']}' is {beams} and '{names['best_of']}' {chosen['best_of']}: give one of them"
        )
    if beams > 1:
        chosen["do_sample"] = False
    best_of = beams if beams > 1 else chosen.get("best_of", n)
    if best_of < n:
        name = names["beam_width" if beams > 1 else "best_of"]
        problems.invalid.append(f"'{name}' is {best_of}: expected at least '{names['n']}', which is {n}")
    if max(n, best_of) > _MOST_SEQUENCES:
        name = names["n" if n == max(n, best_of) and "n" in problems.sent else "beam_width" if beams > 1 else "best_of"]
        problems.invalid.append(f"'{name}' is {max(n, best_of)}: expected at most {_MOST_SEQUENCES}")
        n = best_of = beams = chosen["n"] = chosen["beam_width"] = 1  # the encoder of a refused request stays small
    chosen["best_of"] = best_of if beams == 1 and (best_of > n or (ranked and n > 1)) else None
    sampling = Sampling(**chosen)
    most = sampling.max_new_tokens or values.get("default_new_tokens", 0)
    if 0 < most < sampling.min_new_tokens:
        problems.invalid.append(
            f"the least number of new tokens is {sampling.min_new_tokens}: expected at most "
            f"'{names['max_new_tokens']}', which is {most}{'' if sampling.max_new_tokens else ' by default'}"
        )
    return sampling


_REQUEST_FIELDS = frozenset(GenerationRequest.__struct_fields__)


def generation_request(values: dict[str, Any], sampling: Sampling, logprobs: bool, **fields: Any) -> GenerationRequest:
    """The request of the values whose targets are its fields, and of further fields.

    `logprobs`: the response has a place for log-probabilities.
    """
    given = {name: value for name, value in values.items() if name in _REQUEST_FIELDS}
    given["sampling"] = sampling
    given["logprobs"] = logprobs
    given["asks_logprobs"] = values.get("details", False)
    given["needs_logprobs"] = values.get("logprobs", False) or sampling.best_of is not None
    return GenerationRequest(**given | fields)


def refuse_ranked_stream(sampling: Sampling, problems: Problems) -> None:
    """Refuse a stream whose best sequences are chosen at its end."""
    if sampling.sequences > sampling.n:
        problems.invalid.append(
            f"'{problems.sent.get('beam_width', 'best_of')}' is {sampling.sequences}, 'n' {sampling.n} and 'stream' "
            "true: which sequences are the best is known only at the end, expected 'best_of' to be 'n' and no beams "
            "in a stream"
        )
