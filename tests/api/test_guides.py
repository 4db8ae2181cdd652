from __future__ import annotations

from typing import Any

import pytest

from djl_trtllm.api.guides import GUIDES
from djl_trtllm.api.parameters import Problems, Table
from djl_trtllm.request import Guide, GuideKind

TABLE = Table(GUIDES)
SCHEMA = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')
OBJECT = {"type": "object"}


def read(name: str, value: object) -> tuple[dict[str, Any], list[str]]:
    problems = Problems()
    found = TABLE.read({name: value}, problems, "parameter")
    assert problems.unsupported == []
    return found, problems.invalid


def regex(text: str) -> Guide:
    return Guide(GuideKind.REGEX, text)


@pytest.mark.parametrize(
    ("name", "value", "guide"),
    [
        ("grammar", {"type": "json", "value": OBJECT}, SCHEMA),
        ("grammar", {"type": "json", "value": '{"type": "object"}'}, SCHEMA),
        ("grammar", {"type": "regex", "value": "a+"}, regex("a+")),
        ("guided_json", OBJECT, SCHEMA),
        ("guided_json", {}, Guide(GuideKind.JSON_SCHEMA, "{}")),
        ("guided_json", '{"type": "object"}', SCHEMA),
        ("guided_regex", "a+", regex("a+")),
        ("guided_regex", "a" * 65_536, regex("a" * 65_536)),
        ("guided_choice", ["a.", "b|c"], regex(r"(a\.|b\|c)")),
        ("guided_choice", ["a"], regex("(a)")),
        ("guided_choice", ["a"] * 64, regex("(" + "|".join(["a"] * 64) + ")")),
        ("guided_grammar", 'root ::= "a"', Guide(GuideKind.GRAMMAR, 'root ::= "a"')),
        ("response_format", {"type": "text"}, None),
        ("response_format", {"type": "json_object"}, Guide(GuideKind.JSON_OBJECT)),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}}, SCHEMA),
        ("response_format", {"type": "json_schema", "json_schema": OBJECT}, SCHEMA),
        ("response_format", {"type": "json", "value": OBJECT}, SCHEMA),
        ("response_format", {"type": "regex", "value": "a+"}, regex("a+")),
        ("guided_decoding", {"json": OBJECT}, SCHEMA),
        ("guided_decoding", {"regex": "a+", "grammar": None}, regex("a+")),
        ("guided_decoding", {"grammar": "x"}, Guide(GuideKind.GRAMMAR, "x")),
        ("guided_decoding", {"json_object": True, "regex": None}, Guide(GuideKind.JSON_OBJECT)),
        ("guided_decoding", {"json_object": False, "regex": "a+"}, regex("a+")),
    ],
)
def test_each_way_to_ask_becomes_one_guide(name: str, value: object, guide: Guide | None) -> None:
    assert read(name, value) == ({"guide": guide}, [])


EXPECTED = {
    "grammar": '{"type": "json" or "regex", "value": ...}',
    "guided_json": "a JSON schema, as an object or as text",
    "guided_regex": "a regular expression",
    "guided_choice": "a list of up to 64 strings, none of them empty",
    "guided_grammar": "an EBNF grammar",
    "response_format": '{"type": "text", "json_object" or "json_schema"}, the last with a "json_schema"',
    "guided_decoding": 'an object with one of "json", "regex", "grammar" and "json_object"',
}
NO_OBJECT = " (the schema has to be an object)"
NO_REGEX = " (a regular expression is a string)"
NO_GRAMMAR = " (a grammar is a string)"


def nested(levels: int) -> dict[str, Any]:
    """A schema of this number of levels of objects and lists."""
    schema: dict[str, Any] = {"x": "y"}
    for level in range(levels - 1):
        schema = {"items": schema} if level % 2 else {"anyOf": schema}
    return schema


NOT_DEEP = [
    ("guided_json", nested(64)),
    ("guided_json", {"anyOf": [{}] * 1000}),
    ("guided_regex", "(" * 64 + "a" + ")" * 64),
    ("guided_regex", "(a)" * 1000),
    ("guided_regex", r"\(" * 1000),
    ("guided_regex", "[(]" * 1000),
    ("guided_regex", r"[\](]" * 1000),
    ("guided_regex", "[" + "(" * 1000),
    ("guided_regex", "[" * 65_536),
    ("guided_choice", ["(" * 100]),
    ("guided_grammar", 'root ::= "(((" [(] ' * 1000),
    ("guided_grammar", r'"\"("' * 100),
    ("guided_grammar", '"' + "(" * 1000),
]
DEEP = [
    ("guided_json", nested(65)),
    ("guided_json", '{"a":' * 300 + "1" + "}" * 300),
    ("guided_regex", "(" * 65 + "a" + ")" * 65),
    ("guided_regex", ")" + "(" * 66),
    ("guided_regex", '"' + "(" * 65 + '"'),
    ("guided_grammar", "root ::= " + "(" * 65 + '"a"' + ")" * 65),
]


@pytest.mark.parametrize(("name", "value"), NOT_DEEP, ids=[str(number) for number in range(len(NOT_DEEP))])
def test_64_levels_and_any_number_of_brackets_that_do_not_nest_are_accepted(name: str, value: object) -> None:
    assert read(name, value)[1] == []


@pytest.mark.parametrize(("name", "value"), DEEP, ids=[str(number) for number in range(len(DEEP))])
def test_a_guide_nested_deeper_is_refused(name: str, value: object) -> None:
    (problem,) = read(name, value)[1]
    assert "(it is nested deeper than 64 levels)" in problem


def test_every_row_says_what_it_expects() -> None:
    assert {name: row.kind.expected for name, row in TABLE.rows.items() if row.kind is not None} == EXPECTED


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("grammar", "a+", ""),
        ("grammar", {"type": "ebnf", "value": "x"}, ""),
        ("grammar", {"type": "regex", "value": "a+", "more": 1}, ""),
        ("grammar", {"value": "a+"}, ""),
        ("grammar", {"type": "json"}, NO_OBJECT),
        ("grammar", {"type": "regex"}, NO_REGEX),
        ("guided_json", [], NO_OBJECT),
        ("guided_json", "[]", NO_OBJECT),
        ("guided_json", True, NO_OBJECT),
        ("guided_regex", "", NO_REGEX),
        ("guided_regex", 3, NO_REGEX),
        ("guided_regex", "a" * 65_537, " (it has 65537 characters, at most 65536 are accepted)"),
        ("guided_json", {"description": "x" * 65_536}, " (it has 65554 characters, at most 65536 are accepted)"),
        ("guided_choice", "a", ""),
        ("guided_choice", [], ""),
        ("guided_choice", [""], ""),
        ("guided_choice", ["a", 1], ""),
        ("guided_choice", ["a"] * 65, ""),
        ("guided_grammar", "", NO_GRAMMAR),
        ("guided_grammar", 3, NO_GRAMMAR),
        ("response_format", "json", ""),
        ("response_format", {"type": "yaml"}, ""),
        ("response_format", {}, ""),
        ("response_format", {"type": "json_schema"}, NO_OBJECT),
        ("response_format", {"type": "json_schema", "json_schema": [1]}, NO_OBJECT),
        ("response_format", {"type": "json", "value": 3}, NO_OBJECT),
        ("guided_decoding", "a+", ""),
        ("guided_decoding", {}, ""),
        ("guided_decoding", {"regex": None}, ""),
        ("guided_decoding", {"regex": "a", "json_object": True}, ""),
        ("guided_decoding", {"json_object": 1}, ""),
        ("guided_decoding", {"structural_tag": "x"}, ""),
        ("guided_decoding", {"regex": 3}, NO_REGEX),
    ],
)
def test_another_form_is_refused_with_what_is_expected(name: str, value: object, hint: str) -> None:
    found, (problem,) = read(name, value)
    assert found == {}
    assert problem.startswith(f"'{name}' is ") and problem.endswith(f": expected {EXPECTED[name]}{hint}")


def test_a_schema_that_is_no_json_is_reported_with_the_reason() -> None:
    _, (problem,) = read("guided_json", "{")
    assert f"expected {EXPECTED['guided_json']} (the schema is not JSON: " in problem


def test_a_request_has_one_guide() -> None:
    problems = Problems()
    TABLE.read({"guided_regex": "a+", "guided_json": OBJECT}, problems, "parameter")
    assert problems.invalid == [
        "'guided_json' and 'guided_regex' mean the same and have different values: give one",
    ]


def test_a_schema_that_cannot_be_written_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"a": deep}
    _, (problem,) = read("guided_json", deep)
    assert problem.endswith(" (it is nested deeper than 64 levels)")
