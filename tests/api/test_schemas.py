"""Schemas of values, joined."""

from __future__ import annotations

import pytest

from djl_trtllm.api.schemas import (
    BOOLEAN,
    INTEGER,
    NULL,
    NUMBER,
    STRING,
    any_of,
    joined,
    list_of,
    members,
    nullable,
    schema_of,
)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("a", STRING),
        (1, INTEGER),
        (1.5, NUMBER),
        (True, BOOLEAN),
        (None, NULL),
        ([], list_of({})),
        ([1, 2], list_of(INTEGER)),
        ([1, "a", 2], list_of(any_of(INTEGER, STRING))),
        ({"a": {"b": 1}}, members({"a": members({"b": INTEGER})})),
    ],
)
def test_the_schema_of_a_value(value: object, schema: object) -> None:
    assert schema_of(value) == schema


def test_an_object_is_closed() -> None:
    assert members({"a": STRING}, optional={"b": INTEGER}) == {
        "type": "object",
        "properties": {"a": STRING, "b": INTEGER},
        "required": ["a"],
        "additionalProperties": False,
    }


def test_joined_objects_have_the_members_of_both_and_require_those_that_both_have() -> None:
    one, other = schema_of({"a": 1, "b": None}), schema_of({"b": "x", "c": 1})
    assert joined(one, other) == {
        "type": "object",
        "properties": {"a": INTEGER, "b": any_of(NULL, STRING), "c": INTEGER},
        "required": ["b"],
        "additionalProperties": False,
    }
    assert joined(one, one) == one


def test_other_schemas_become_alternatives() -> None:
    assert joined(STRING, NULL) == {"anyOf": [STRING, NULL]}
    assert joined(any_of(STRING, NULL), any_of(NULL, INTEGER)) == {"anyOf": [STRING, NULL, INTEGER]}
    assert joined(members({}), STRING) == {"anyOf": [members({}), STRING]}


def test_the_words_are_json_schemas() -> None:
    assert [each["type"] for each in (STRING, INTEGER, NUMBER, BOOLEAN, NULL)] == [
        *("string", "integer", "number", "boolean", "null"),
    ]
    assert list_of(STRING) == {"type": "array", "items": {"type": "string"}}
    assert nullable(STRING) == {"anyOf": [{"type": "string"}, {"type": "null"}]}
