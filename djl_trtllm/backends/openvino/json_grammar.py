"""JSON schemas as EBNF grammars for xgrammar, with limited white space.

xgrammar's own conversion, the one that OpenVINO GenAI calls, allows any amount of white space between two tokens of
JSON. Small models then generate nothing else until their tokens are used up. It also allows numbers of any length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_MOST_NUMBERS = 256
"""Of a range of integers that is written as a list."""
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "$schema", "$id", "$comment", "$defs", "definitions"),
        *("deprecated", "readOnly", "writeOnly"),
    }
)
_BASE = {
    "ws": r'("\n" [ ]{0,8} | " ")?',
    "hex": "[0-9a-fA-F]",
    # Without halves of surrogate pairs, which are no characters.
    "escape": r'"\\" (["\\/bfnrt] | "u" ([0-9a-cA-CefEF] hex hex hex | [dD] [0-7] hex hex))',
    "char": r'[^"\\\x00-\x1f] | escape',
    "string": r'"\"" char* "\""',
    "integer": '"-"? ("0" | [1-9] [0-9]{0,17})',
    "number": '"-"? ("0" | [1-9] [0-9]{0,14}) ("." [0-9]{1,15})? ([eE] [+-]? [0-9]{1,2})?',
    "boolean": '"true" | "false"',
    "null": '"null"',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (string ws ":" ws value (ws "," ws string ws ":" ws value)* ws)? "}"',
    "array": '"[" ws (value (ws "," ws value)* ws)? "]"',
}
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}


class _UnknownError(Exception):
    """A schema that this module does not convert."""


def any_object() -> str:
    """The grammar of all JSON objects."""
    return _text({"root": "object"})


def grammar_of(schema: str) -> str | None:
    """The grammar of a JSON schema, given as JSON; None where it has keywords for which there is only xgrammar's.

    As there, properties come in the schema's order, and only those that it names.
    """
    try:
        converter = _Converter(json.loads(schema))
        return _text({"root": converter.root()} | converter.rules)
    except (_UnknownError, ValueError, RecursionError):
        return None


def _text(rules: dict[str, str]) -> str:
    return "\n".join(f"{name} ::= {body}" for name, body in (_BASE | rules).items())


class _Converter:
    def __init__(self, schema: Any) -> None:
        self.rules: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._schema = schema
        self._references: dict[str, str] = {}
        self._kinds: dict[str, Callable[[dict[str, Any]], str]] = {
            "string": self._string,
            "object": self._object,
            "array": self._array,
            "integer": self._integer,
        }

    def root(self) -> str:
        return self._reference("#")

    def _rule(self, body: str) -> str:
        """The name of a rule; equal ones are one, which xgrammar compiles once."""
        if not body or body not in self._names:
            self._names[body] = f"r{len(self.rules)}"
            self.rules[self._names[body]] = body
        return self._names[body]

    def _convert(self, schema: Any) -> str:
        """An expression for a schema: the name of a rule, or one in parentheses."""
        if schema is True:
            return "value"
        if not isinstance(schema, dict):
            raise _UnknownError
        keywords = {name: value for name, value in schema.items() if name not in _ANNOTATIONS}
        if not keywords:
            return "value"
        for name in ("$ref", "anyOf", "oneOf", "allOf"):
            if name in keywords:
                return self._composed(name, keywords)
        if "enum" in keywords or "const" in keywords:
            return self._values(keywords)
        return self._typed(keywords.pop("type", None), keywords)

    def _typed(self, kind: Any, keywords: dict[str, Any]) -> str:
        if isinstance(kind, list) and len(kind) > 1 and not keywords:
            return self._rule(" | ".join(self._typed(item, {}) for item in kind))
        if isinstance(kind, list) and len(kind) == 1:
            (kind,) = kind
        if not isinstance(kind, str) or kind not in _TYPES:
            raise _UnknownError
        if not keywords:
            return kind
        if kind not in self._kinds:
            raise _UnknownError
        return self._kinds[kind](keywords)

    def _composed(self, name: str, keywords: dict[str, Any]) -> str:
        value = keywords.pop(name)
        if keywords:
            raise _UnknownError
        if name == "$ref":
            if not isinstance(value, str):
                raise _UnknownError
            return self._reference(value)
        if not isinstance(value, list) or not value or (name == "allOf" and len(value) > 1):
            raise _UnknownError
        return self._rule(" | ".join(self._convert(item) for item in value))

    def _reference(self, pointer: str) -> str:
        """The rule of a part of the schema; it may refer to itself."""
        if pointer not in self._references:
            if not pointer.startswith("#") or "~" in pointer or "%" in pointer:
                raise _UnknownError
            schema = self._schema
            for part in pointer[1:].split("/")[1:]:
                if not isinstance(schema, dict) or part not in schema:
                    raise _UnknownError
                schema = schema[part]
            name = self._references[pointer] = self._rule("")
            self.rules[name] = self._convert(schema)
            if self.rules[name] == name:
                raise _UnknownError
        return self._references[pointer]

    def _values(self, keywords: dict[str, Any]) -> str:
        values = keywords["enum"] if "enum" in keywords else [keywords["const"]]
        kind = keywords.get("type")
        if keywords.keys() - {"enum", "const", "type"} or {"enum", "const"} <= keywords.keys() or not values:
            raise _UnknownError
        if not isinstance(values, list) or (kind is not None and not isinstance(kind, str)):
            raise _UnknownError
        if kind is not None and not all(isinstance(value, _TYPES.get(kind, ())) for value in values):
            raise _UnknownError
        return self._rule(" | ".join(_literal(json.dumps(value, ensure_ascii=False)) for value in values))

    def _string(self, keywords: dict[str, Any]) -> str:
        return self._rule(rf'"\"" char{_times(keywords, "minLength", "maxLength")} "\""')

    def _integer(self, keywords: dict[str, Any]) -> str:
        low, high = keywords.pop("minimum", None), keywords.pop("maximum", None)
        if keywords or type(low) is not int or not (high is None or type(high) is int):
            raise _UnknownError
        if high is None and low == 0:
            return self._rule('"0" | [1-9] [0-9]{0,17}')
        if high is None or not 0 <= high - low < _MOST_NUMBERS:
            raise _UnknownError
        return self._rule(" | ".join(_literal(str(number)) for number in range(low, high + 1)))

    def _array(self, keywords: dict[str, Any]) -> str:
        item = self._convert(keywords.pop("items", True))
        least, most = _bounds(keywords, "minItems", "maxItems")
        if most == 0:
            return self._rule('"[" ws "]"')
        more = f'(ws "," ws {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        filled = f"{item} {more} ws"
        return self._rule(f'"[" ws {filled} "]"' if least else f'"[" ws ({filled})? "]"')

    def _object(self, keywords: dict[str, Any]) -> str:
        properties, required = keywords.pop("properties", {}), keywords.pop("required", [])
        others = keywords.pop("additionalProperties", None)
        if keywords or not isinstance(properties, dict) or not isinstance(required, list):
            raise _UnknownError
        if not properties and not required and others is not False:
            member = f'string ws ":" ws {self._convert(True if others is None else others)}'
            return self._rule(f'"{{" ws ({member} (ws "," ws {member})* ws)? "}}"')
        if others not in (None, False) or not all(name in properties for name in required):
            raise _UnknownError
        rest = '""'
        begins: list[str] = []
        # From the last: `rest` is what may follow a property, `begins` the properties that may be the first.
        for name, schema in reversed(properties.items()):
            member = self._rule(f'{_literal(json.dumps(name, ensure_ascii=False))} ws ":" ws {self._convert(schema)}')
            begin = f"{member} {rest}"
            if name in required:
                begins, rest = [begin], self._rule(f'ws "," ws {member} {rest}')
            else:
                begins, rest = [begin, *begins], self._rule(f'(ws "," ws {member})? {rest}')
        if not begins:
            return self._rule('"{" ws "}"')
        whole = f"({' | '.join(begins)}) ws"
        return self._rule(f'"{{" ws {whole} "}}"' if required else f'"{{" ws ({whole})? "}}"')


def _literal(text: str) -> str:
    """A text as a string of EBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _bounds(keywords: dict[str, Any], least: str, most: str) -> tuple[int, int | None]:
    low, high = keywords.pop(least, 0), keywords.pop(most, None)
    if keywords or type(low) is not int or not (high is None or type(high) is int):
        raise _UnknownError
    if low < 0 or (high is not None and high < low):
        raise _UnknownError
    return low, high


def _times(keywords: dict[str, Any], least: str, most: str) -> str:
    low, high = _bounds(keywords, least, most)
    return f"{{{low},{'' if high is None else high}}}"
