"""JSON schemas as grammars: the grammar as a regular expression of Python decides what it lets through."""

from __future__ import annotations

import json
import math
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.backends.json_grammar import SchemaError, any_object, as_grammar, grammar_of
from djl_trtllm.backends.pattern_grammar import FORMATS, Pattern, counted, ranged
from djl_trtllm.request import Guide, GuideKind
from tests.api.models import seconds
from tests.support.tables import by_rows

TABLES = json.loads(Path(__file__).with_name("json_grammar.json").read_text())
_PIECE = re.compile(r'"((?:[^"\\]|\\.)*)"|(\[(?:[^\]\\]|\\.)*\])|([a-z]\w*)|(\S)')
_DEPTH = 7


def expression(grammar: str, name: str = "root") -> re.Pattern[str]:
    """The grammar without what is nested deeper than some levels."""
    rules = dict(line.split(" ::= ", 1) for line in grammar.splitlines())

    @cache
    def expand(body: str, depth: int) -> str:
        if depth > _DEPTH:
            return "(?!)"
        found = ""
        for text, characters, rule, other in _PIECE.findall(body):
            if rule:
                found += f"(?:{expand(rules[rule], depth + 1)})"
            elif characters:
                found += characters.replace("[", r"\[").replace(r"\[", "[", 1)
            else:
                found += {"(": "(?:"}.get(other, other) or f"(?:{re.escape(json.loads(f'{chr(34)}{text}{chr(34)}'))})"
        return found

    return re.compile(expand(rules[name], 0))


@by_rows(("schema", "good", "bad"), TABLES["values"])
def test_a_grammar_lets_through_what_fits_the_schema(schema: Any, good: list[str], bad: list[str]) -> None:
    text, _ = grammar_of(json.dumps(schema))
    let_through = expression(text)
    assert [value for value in good if not let_through.fullmatch(value)] == []
    assert [value for value in bad if let_through.fullmatch(value)] == []


@by_rows(("schema", "names", "_"), TABLES["not_followed"])
def test_what_a_grammar_does_not_follow_is_named(schema: Any, names: list[str], _: Any) -> None:
    assert list(grammar_of(json.dumps(schema)).not_followed) == names


@by_rows(("schema", "problem"), TABLES["wrong"])
def test_a_schema_that_is_wrong_is_an_error_that_says_where(schema: Any, problem: str) -> None:
    with pytest.raises(SchemaError, match=re.escape(problem)):
        grammar_of(json.dumps(schema))


def test_a_schema_of_many_references_is_not_converted_for_ever() -> None:
    definitions = {f"d{level}": {"allOf": 2 * [{"$ref": f"#/$defs/d{level + 1}"}]} for level in range(40)}
    doubled = {"$ref": "#/$defs/d0", "$defs": definitions | {"d40": {"type": "null"}}}
    assert expression(grammar_of(json.dumps(doubled)).text).fullmatch("null")
    several = {
        "$defs": {f"d{level}": {"anyOf": 2 * [{"$ref": f"#/$defs/d{level + 1}", "minimum": 1}]} for level in range(40)}
    }
    with pytest.raises(SchemaError):
        grammar_of(json.dumps({"$ref": "#/$defs/d0"} | several))
    for text in ("", "{", '{"a":' * 5000):
        with pytest.raises(SchemaError):
            grammar_of(text)


@pytest.mark.parametrize("between", [True, False], ids=["objects", "alternatives"])
def test_the_cost_of_references_grows_with_their_number_and_no_faster(between: bool) -> None:
    """Example: 1,600 objects, each in the next one, took 14 seconds, in the engine's loop too."""

    def cost(number: int) -> float:
        definitions: dict[str, Any] = {"d0": {"anyOf": [{"type": "null"}, {"items": {"$ref": "#/$defs/d0"}}]}}
        for at in range(1, number):
            before = {"$ref": f"#/$defs/d{at - 1}"}
            alternatives = {"anyOf": [before, {"const": at}]}
            definitions[f"d{at}"] = {"properties": {"a": before}, "required": ["a"]} if between else alternatives
        alternatives = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in definitions]}
        schemas = (json.dumps(alternatives | {"$defs": definitions, "title": str(each)}) for each in range(3))
        return seconds(lambda: grammar_of(next(schemas)))

    assert cost(1200) < 40 * cost(100)  # 12 times as many; 144 if each cost as much as all before it


def test_ranges_of_integers_are_exact() -> None:
    chosen = random.Random(1)
    for _ in range(300):
        low = chosen.choice([0, 1, 7, 9, 10, 99, 100, chosen.randrange(5000)])
        high = low + chosen.choice([0, 1, 5, 90, chosen.randrange(20_000)])
        let_through = expression(f"root ::= {ranged(low, high)}")
        near = {low, high, low - 1, high + 1, 0, 9, 10, 99, 100, chosen.randrange(30_000)}
        wrong = [each for each in near if bool(let_through.fullmatch(str(each))) != (low <= each <= high)]
        assert not wrong, (low, high)


def test_counts_are_exact() -> None:
    chosen = random.Random(1)
    for _ in range(200):
        low = chosen.choice([0, 1, 64, 128, 129, 192, chosen.randrange(9000)])
        high = chosen.choice([math.inf, low, low + 1, low + 64, low + 129, low + chosen.randrange(9000)])
        let_through = expression(f"root ::= {counted('[a]', low, high)}")
        near = {low - 1, low, low + 1, low + 64, low + 1000}
        near |= set() if high == math.inf else {int(high) + each for each in (-64, -1, 0, 1)}
        found = {each: let_through.fullmatch("a" * each) is not None for each in near if each >= 0}
        wrong = [each for each in found if found[each] != (low <= each <= high)]
        assert not wrong, (low, high)


def test_no_count_of_a_grammar_is_one_that_tokens_wait_for() -> None:
    """xgrammar writes counts out up to 128."""
    schema = {"type": "array", "minItems": 300, "items": {"type": "string", "minLength": 5000, "maxLength": 10**9}}
    text, _ = grammar_of(json.dumps(schema | {"contains": {"pattern": "^a{200,1000}$"}}))
    assert max(map(int, re.findall(r"[{,](\d+)}", text))) <= 128
    assert len(text) < 5000


@by_rows(
    "pattern", ["^a+b?$", "a", "^(x|yz){1,2}$", r"^\w\s\d$", "^[^ab]$", "^.$", "^$", "a$|^b", r"^[\\\"]{2}$", "^a{,2}$"]
)
def test_a_pattern_lets_through_the_same_texts_as_a_regular_expression(pattern: str) -> None:
    characters = 'abxyz1 "\\é{,2}'
    chosen = random.Random(1)
    let_through = expression(f"{any_object()}\nroot ::= {Pattern(pattern).text}".replace("root ::= object\n", ""))
    for _ in range(500):
        text = "".join(chosen.choices(characters, k=chosen.randrange(6)))
        inside = json.dumps(text, ensure_ascii=False)[1:-1]
        # Python's $ also stands before a line end, and its {,2} counts.
        expected = re.search(pattern.replace("$", r"\Z").replace("{,", r"\{,"), text)
        assert bool(let_through.fullmatch(inside)) == bool(expected), text


@by_rows("name", FORMATS)
def test_a_format_is_a_pattern_that_can_be_read(name: str) -> None:
    assert Pattern(FORMATS[name]).least > 0


def test_guides_that_are_no_json_stay_as_they_are() -> None:
    regex = Guide(GuideKind.REGEX, "a")
    assert as_grammar(regex) == (regex, ())
    found, _ = as_grammar(Guide(GuideKind.JSON_OBJECT))
    assert expression(found.value).fullmatch('{"a": [1]}') and not expression(found.value).fullmatch("[]")
    assert as_grammar(Guide(GuideKind.JSON_SCHEMA, '{"not": {}}', strict=True))[0].strict
