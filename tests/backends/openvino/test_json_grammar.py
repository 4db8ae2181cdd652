"""Which schemas are converted, and to what. What is generated from them: test_executor_guides.py."""

from __future__ import annotations

import json
from typing import Any

import pytest

from djl_trtllm.backends.openvino.json_grammar import any_object, grammar_of

PROPERTIES = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "null"}}


def rules(schema: object) -> dict[str, str]:
    """The rules that are the schema's own, by name."""
    text = grammar_of(json.dumps(schema))
    assert text is not None
    named = dict(line.split(" ::= ", 1) for line in text.splitlines())
    common = dict(line.split(" ::= ", 1) for line in any_object().splitlines())
    return {name: body for name, body in named.items() if name not in common or name == "root"}


@pytest.mark.parametrize(
    ("schema", "expression"),
    [
        (True, "value"),
        ({}, "value"),
        ({"title": "T", "description": "D", "default": 1}, "value"),
        ({"type": "string"}, "string"),
        ({"type": "object"}, "object"),
        ({"type": ["null"]}, "null"),
        ({"type": "string", "minLength": 2}, 'r1 = "\\"" char{2,} "\\""'),
        ({"type": "string", "maxLength": 5}, 'r1 = "\\"" char{0,5} "\\""'),
        ({"type": ["string", "null"]}, "r1 = string | null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "r1 = string | null"),
        ({"oneOf": [{"type": "string"}]}, "r1 = string"),
        ({"allOf": [{"type": "string"}]}, "r1 = string"),
        ({"enum": ['a"\\', 1, None, "é"]}, 'r1 = "\\"a\\\\\\"\\\\\\\\\\"" | "1" | "null" | "\\"é\\""'),
        ({"const": "x"}, 'r1 = "\\"x\\""'),
        ({"type": "string", "enum": ["x"]}, 'r1 = "\\"x\\""'),
        ({"type": "integer", "minimum": 0}, 'r1 = "0" | [1-9] [0-9]{0,17}'),
        ({"type": "integer", "minimum": -1, "maximum": 1}, 'r1 = "-1" | "0" | "1"'),
        ({"type": "array", "maxItems": 0}, 'r1 = "[" ws "]"'),
        ({"type": "array", "items": {"type": "null"}}, None),
        ({"type": "array", "minItems": 2}, 'r1 = "[" ws value (ws "," ws value){1,} ws "]"'),
        ({"type": "array", "maxItems": 3}, 'r1 = "[" ws (value (ws "," ws value){0,2} ws)? "]"'),
        ({"type": "object", "additionalProperties": False}, 'r1 = "{" ws "}"'),
        ({"type": "object", "properties": {}, "additionalProperties": {"type": "null"}}, None),
    ],
)
def test_a_schema_is_rules(schema: object, expression: str | None) -> None:
    found = rules(schema)
    assert found.pop("root") == "r0"
    first = found.pop("r0")
    if expression is None:
        return
    assert (f"{first} = {found[first]}" if first in found else first) == expression


def test_properties_keep_their_order_and_optional_ones_may_be_missing() -> None:
    found = rules({"type": "object", "properties": PROPERTIES, "required": ["b"]})
    a, b, c = (next(name for name, body in found.items() if f'"\\"{key}\\""' in body) for key in "abc")
    assert found[a].endswith('ws ":" ws string')
    text = found[found["r0"]]
    rest_of_c = f'(ws "," ws {c})? ""'
    (after_b,) = (name for name, body in found.items() if body == rest_of_c)
    (after_a,) = (name for name, body in found.items() if body == f'ws "," ws {b} {after_b}')
    assert text == f'"{{" ws ({a} {after_a} | {b} {after_b}) ws "}}"'


def test_a_schema_may_refer_to_itself() -> None:
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": []}
    found = rules({"$ref": "#/$defs/node", "$defs": {"node": node}})
    assert any("ws r1" in body for body in found.values())


UNKNOWN: list[Any] = [
    False,
    5,
    [],
    {"type": 5},
    {"type": "stringy"},
    {"type": []},
    {"type": ["string", "null"], "minLength": 1},
    {"properties": {}},
    {"minLength": 1},
    {"not": {}},
    {"type": "string", "pattern": "a"},
    {"type": "string", "minLength": 2, "maxLength": 1},
    {"type": "string", "minLength": -1},
    {"type": "string", "minLength": "1"},
    {"type": "string", "minLength": True},
    {"type": "string", "maxLength": "1"},
    {"type": "boolean", "minimum": 1},
    {"type": "number", "minimum": 1},
    {"type": "integer", "maximum": 1},
    {"type": "integer", "minimum": 1},
    {"type": "integer", "minimum": 0, "maximum": 256},
    {"type": "integer", "minimum": 1, "maximum": 0},
    {"type": "integer", "minimum": 0, "maximum": 1.5},
    {"type": "integer", "minimum": 0, "multipleOf": 2},
    {"type": "array", "prefixItems": []},
    {"type": "array", "items": False},
    {"type": "array", "items": {"type": "string", "format": "date"}},
    {"type": "object", "properties": []},
    {"type": "object", "required": "a"},
    {"type": "object", "required": ["a"]},
    {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
    {"type": "object", "properties": {"a": {}}, "minProperties": 1},
    {"anyOf": []},
    {"anyOf": "a"},
    {"anyOf": [{}], "type": "string"},
    {"allOf": [{}, {}]},
    {"$ref": 5},
    {"$ref": "other.json"},
    {"$ref": "#/nothing"},
    {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {}}},
    {"$ref": "#", "type": "string"},
    {"enum": []},
    {"enum": "abc"},
    {"enum": [1], "const": 1},
    {"enum": [1], "type": "string"},
    {"enum": [1], "type": ["string"]},
    {"enum": [1], "minimum": 1},
]


@pytest.mark.parametrize("schema", UNKNOWN, ids=json.dumps)
def test_what_is_not_converted_is_left_to_xgrammar(schema: object) -> None:
    assert grammar_of(json.dumps(schema)) is None
    assert grammar_of(json.dumps({"type": "object", "properties": {"a": schema}})) is None


def test_a_schema_that_is_only_itself_is_left_to_xgrammar() -> None:
    assert grammar_of('{"$ref": "#"}') is None


@pytest.mark.parametrize("text", ["", "{", '{"a":' * 5000], ids=["empty", "cut", "deep"])
def test_what_is_no_schema_is_left_to_xgrammar(text: str) -> None:
    assert grammar_of(text) is None
