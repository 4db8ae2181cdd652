"""The parameters for guided decoding of several APIs, all parsed into a `Guide`.

TGI: `grammar` = `{"type": "json" | "regex", "value": ...}`. vLLM: `guided_json`, `guided_regex`, `guided_choice`,
`guided_grammar`. OpenAI: `response_format` = `{"type": "text" | "json_object" | "json_schema", "json_schema": ...}`.
TensorRT-LLM: `guided_decoding` = an object with one of `json`, `regex`, `grammar` and `json_object`.

Size and nesting are limited: engines compile guides with recursive functions, whose time grows faster than the guide.
"""

from __future__ import annotations

import re
from typing import Any

import orjson

from djl_trtllm.api.parameters import Kind, Parameter
from djl_trtllm.request import Guide, GuideKind

_MOST_CHARACTERS = 65_536
"""Limits the time that the engine needs to compile a grammar."""

_MOST_CHOICES = 64
_MOST_LEVELS = 64
"""How deep a guide is nested. Hundreds of levels take minutes to compile, thousands overflow the engine's stack."""
_TOO_DEEP = f" (it is nested deeper than {_MOST_LEVELS} levels)"
_CLASS = r"\\.|\[[^\]\\]*(?:\\.[^\]\\]*)*\]?"
_REGEX_PARTS = re.compile(rf"{_CLASS}|[()]", re.DOTALL)
_GRAMMAR_PARTS = re.compile(rf'{_CLASS}|"[^"\\]*(?:\\.[^"\\]*)*"?|[()]', re.DOTALL)
"""Parentheses, and what may have some that do not nest: escapes, character classes, strings."""


def read_schema(value: Any) -> Guide:
    """A JSON schema, as an object or as text. Raises ValueError with a hint."""
    if type(value) is str:
        _require_short(value)
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ValueError(f" (the schema is not JSON: {error})") from None
    if type(value) is not dict:
        raise ValueError(" (the schema has to be an object)")
    try:
        text = orjson.dumps(value).decode()
    except TypeError:  # it gives up at 254 levels
        raise ValueError(_TOO_DEEP) from None
    _require_short(text)
    if _levels(value) > _MOST_LEVELS:
        raise ValueError(_TOO_DEEP)
    return Guide(GuideKind.JSON_SCHEMA, text)


def _levels(value: dict[str, Any]) -> int:
    """How deep lists and objects are nested, counted no further than the limit."""
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


def _regex(value: Any) -> Guide:
    if type(value) is not str or not value:
        raise ValueError(" (a regular expression is a string)")
    _require_short(value)
    _require_shallow(_REGEX_PARTS.findall(value))
    return Guide(GuideKind.REGEX, value)


def _grammar(value: Any) -> Guide:
    if type(value) is not str or not value:
        raise ValueError(" (a grammar is a string)")
    _require_short(value)
    _require_shallow(_GRAMMAR_PARTS.findall(value))
    return Guide(GuideKind.GRAMMAR, value)


def _require_shallow(parts: list[str]) -> None:
    """Raise ValueError where parentheses are nested too deep."""
    depth = 0
    for part in parts:
        depth += 1 if part == "(" else -1 if part == ")" else 0
        if depth > _MOST_LEVELS:
            raise ValueError(_TOO_DEEP)


def _choice(value: Any) -> Guide:
    valid = type(value) is list and 0 < len(value) <= _MOST_CHOICES
    if not valid or not all(type(item) is str and item for item in value):
        raise ValueError("")
    _require_short("|".join(value))
    text = "(" + "|".join(re.escape(item) for item in value) + ")"
    _require_short(text)
    return Guide(GuideKind.REGEX, text)


def _require_short(text: str) -> None:
    """Raise ValueError, before anything is done with the text of a guide, if it is too long."""
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f" (it has {len(text)} characters, at most {_MOST_CHARACTERS} are accepted)")


def _tgi_grammar(value: Any) -> Guide:
    if type(value) is not dict or value.keys() - {"type", "value"} or value.get("type") not in ("json", "regex"):
        raise ValueError("")
    return read_schema(value.get("value")) if value["type"] == "json" else _regex(value.get("value"))


def _response_format(value: Any) -> Guide | None:
    kind = value.get("type") if type(value) is dict else None
    if kind == "text":
        return None
    if kind == "json_object":
        return Guide(GuideKind.JSON_OBJECT)
    if kind == "json_schema":
        described = value.get("json_schema")
        return read_schema(described["schema"] if type(described) is dict and "schema" in described else described)
    if kind in ("json", "regex"):  # TGI takes its grammars here as well
        return _tgi_grammar(value)
    raise ValueError("")


def _guided_decoding(value: Any) -> Guide:
    readers = {"json": read_schema, "regex": _regex, "grammar": _grammar}
    given = {name: item for name, item in value.items() if item not in (None, False)} if type(value) is dict else {}
    if len(given) != 1:
        raise ValueError("")
    ((name, item),) = given.items()
    if name == "json_object" and item is True:
        return Guide(GuideKind.JSON_OBJECT)
    if name not in readers:
        raise ValueError("")
    return readers[name](item)


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
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", "json", "regex"]}, "json_schema": {}},
    "required": ["type"],
}
_GUIDED_DECODING = {
    "type": "object",
    "properties": {"json": {}, "regex": {}, "grammar": {}, "json_object": {}},
}

GUIDES = (
    Parameter(("grammar",), Kind('{"type": "json" or "regex", "value": ...}', _tgi_grammar, _TGI_GRAMMAR), "guide"),
    Parameter(("guided_json",), Kind("a JSON schema, as an object or as text", read_schema, _SCHEMA), "guide"),
    Parameter(("guided_regex",), Kind("a regular expression", _regex, _TEXT), "guide"),
    Parameter(
        ("guided_choice",),
        Kind(
            f"a list of up to {_MOST_CHOICES} strings, none of them empty",
            _choice,
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": _MOST_CHOICES},
        ),
        "guide",
    ),
    Parameter(("guided_grammar",), Kind("an EBNF grammar", _grammar, _TEXT), "guide"),
    Parameter(
        ("response_format",),
        Kind(
            '{"type": "text", "json_object" or "json_schema"}, the last with a "json_schema"',
            _response_format,
            _RESPONSE_FORMAT,
        ),
        "guide",
    ),
    Parameter(
        ("guided_decoding",),
        Kind('an object with one of "json", "regex", "grammar" and "json_object"', _guided_decoding, _GUIDED_DECODING),
        "guide",
    ),
)
"""Rows for the parameter tables."""
