"""The values of arguments: where JSON ends, which type a parameter has, and what else than JSON becomes JSON."""

import ast
import contextlib
import json
import re
import sys
from collections.abc import Mapping
from typing import Any

_LITERAL_END = re.compile(r"[\s,}\]<]")
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]<]', re.DOTALL)
_REST_OF_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*(?P<end>"|\\\Z)', re.DOTALL)


class ValueEnd:
    """Finds the end of a JSON value that arrives in pieces. `first` is its first character.

    Only strings and brackets are looked at. A `<` outside strings is no JSON: the value ends there, `broken`.
    """

    def __init__(self, first: str) -> None:
        self._literal = first not in '"{['
        self._depth = 0
        self._quoted = self._escaped = self.broken = False

    def find(self, text: str, at: int) -> int | None:
        """Return the place in the next piece, from `at` on, where the value ends; None if it goes on."""
        if self._literal:
            end = _LITERAL_END.search(text, at)
            return end and end.start()
        if self._escaped and at < len(text):
            self._escaped, at = False, at + 1
        while self._quoted:
            string = _REST_OF_STRING.match(text, at)
            if string is None:
                return None
            if string["end"] == "\\":  # the last character, because none follows it
                self._escaped = True
                return None
            self._quoted, at = False, string.end()
            if not self._depth:
                return at
        for found in _STRING_OR_BRACKET.finditer(text, at):
            mark = found[0]
            if mark == '"':  # a string that goes on in the next piece
                self._quoted = True
                return self.find(text, found.end())
            if mark == "<":
                self.broken = True
                return found.start()
            self._depth += (mark in "{[") - (mark in "}]")
            if self._depth <= 0:
                return found.end()
        return None


_ENCODER = json.JSONEncoder(ensure_ascii=False)
"""`json.dumps` makes one for each call, which takes longer than encoding a short text."""


def quoted(text: str) -> str:
    """A text as JSON."""
    return _ENCODER.encode(text)


_HEX = "[0-9a-fA-F]"
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_LONGEST_OF_PYTHON = 1 << 16
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?")


def word(text: str) -> str:
    """A value without quotes, as JSON: a number, one of Python's or JSON's three words, or else a text."""
    if text in _WORDS or text in _WORDS.values():
        return _WORDS.get(text, text)
    return text if _NUMBER.fullmatch(text) else quoted(text)


_KNOWN = {"\\n": "\\n", "\\t": "\\t", "\\r": "\\r", "\\b": "\\b", "\\f": "\\f", "\\v": "\\u000b", "\\a": "\\u0007"}
_KNOWN |= {"\\\n": "", "\\\\": "\\\\", "\\'": "'", '\\"': '\\"', '"': '\\"', "\n": "\\n"}
"""Escape sequences of Python, and characters that JSON escapes, as they are in JSON."""
_DIGITS = {"x": 2, "u": 4, "U": 8}
_WHOLE = "|".join(f"{mark}(?:{_HEX}{{{most}}}|{_HEX}{{0,{most - 1}}}(?!{_HEX}|\\Z))" for mark, most in _DIGITS.items())
_SEQUENCE = rf"\\(?:{_WHOLE}|[^xuU])"
_UNLIKE_JSON = re.compile(rf'{_SEQUENCE}|["\x00-\x1f]', re.DOTALL)


PYTHON_QUOTES = "'\""


def part_of_string(quote: str) -> re.Pattern[str]:
    """What can be read of the inside of a Python string: up to its end, or to an escape sequence that may go on."""
    other = rf"[^{quote}\\]*"
    return re.compile(f"{other}(?:{_SEQUENCE}{other})*", re.DOTALL)


def unescaped(text: str) -> str:
    """The inside of a Python string, as that of a JSON string. Unknown sequences stand for themselves."""
    return _UNLIKE_JSON.sub(lambda found: _KNOWN.get(found[0]) or _rare(found[0]), text)


def _rare(text: str) -> str:
    mark, digits = text[1:2], text[2:]
    if len(digits) == _DIGITS.get(mark) and (code := int(digits, 16)) <= sys.maxunicode:
        return json.dumps(chr(code))[1:-1]
    return "" if text == "\\\n" else quoted(text)[1:-1]


def as_json(text: str, types: frozenset[str]) -> str:
    """A value that has one of these JSON types, or any if there are none, as JSON: a text if it is nothing else."""
    text = text.strip()
    if not text and types and "string" not in types:
        return "[]" if "array" in types else "{}" if "object" in types else "null"
    if text in _WORDS and (not types or types & {"boolean", "null"}):
        return _WORDS[text]
    try:
        value = _DECODER.decode(text)
    except (ValueError, RecursionError):
        return _of_python(text) if types & {"array", "object"} else quoted(text)
    if "string" not in types or types & _types_of(value):
        return text
    return quoted(text)


def _of_python(text: str) -> str:
    """A list or an object that the model wrote as Python prints it, as JSON: a text if it is none."""
    with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        if text[0] in "[{" and "\\" not in text and len(text) <= _LONGEST_OF_PYTHON:
            return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    return quoted(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def _types_of(value: Any) -> set[str]:
    kind = _TYPES.get(type(value), "null")
    return {kind, "number"} if kind == "integer" else {kind}


def types_in(schema: Any, root: Any) -> frozenset[str]:
    """The JSON types that a schema allows, none if it does not say. Each part of it is looked at once."""
    types: set[str] = set()
    waiting, seen = [schema], set()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        own = part.get("type")
        types.update(name for name in (own if isinstance(own, list) else [own]) if isinstance(name, str))
        if "const" in part:
            types |= _types_of(part["const"])
        for keyword in ("enum", "anyOf", "oneOf", "allOf"):
            values = part.get(keyword)
            if isinstance(values, list) and keyword == "enum":
                types.update(*map(_types_of, values))
            elif isinstance(values, list):
                waiting += values
        if isinstance(part.get("$ref"), str):
            waiting.append(referred(part["$ref"], root))
    return frozenset(types)


def referred(reference: str, root: Any) -> Any:
    """What `#/$defs/name` refers to, None if it is not in this schema."""
    if not reference.startswith("#"):
        return None
    for name in reference.removeprefix("#").strip("/").split("/"):
        root = root.get(name) if isinstance(root, Mapping) else None
    return root


def member_of(schema: Any, key: str | None, root: Any) -> Any:
    """The schema of an object's member, or of a list's items (None), where `schema` says so without alternatives."""
    if isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        schema = referred(schema["$ref"], root)
    if not isinstance(schema, Mapping):
        return None
    if key is None:
        return schema.get("items")
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None
