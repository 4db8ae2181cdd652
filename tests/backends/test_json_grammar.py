"""JSON schemas as grammars: the grammar as a regular expression of Python decides what it lets through."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from djl_trtllm.backends.json_grammar import SchemaError, any_object, as_grammar, grammar_of
from djl_trtllm.backends.pattern_grammar import FORMATS, Pattern, PatternError, counted, ranged
from djl_trtllm.request import Guide, GuideKind
from tests.api.models import seconds
from tests.support.tables import by_rows

TABLES = json.loads(Path(__file__).with_name("json_grammar.json").read_text())
_PIECE = re.compile(r'"((?:[^"\\]|\\.)*)"|(\[(?:[^\]\\]|\\.)*\])|([a-z]\w*)|(\S)')
_DEPTH = 7


def expression(grammar: str, name: str = "root") -> re.Pattern[str]:
    """The grammar without what is nested deeper than some levels."""
    rules = dict(line.split(" ::= ", 1) for line in grammar.split("\n"))

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


@by_rows(("schema", "names", "wrong"), TABLES["not_followed"])
def test_what_a_grammar_does_not_follow_is_named(schema: Any, names: list[str], wrong: str | None) -> None:
    """`wrong` is a value that the schema does not allow."""
    text, not_followed = grammar_of(json.dumps(schema))
    assert list(not_followed) == names
    assert wrong is None or expression(text).fullmatch(wrong)


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
    assert [ranged(3, 12), ranged(10, 99_999)] == ['[3-9] | "1" [0-2]', "[1-9] [0-9]{1,4}"], "lengths are put together"


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


# -- random schemas beside jsonschema ----------------------------------------------------------------------------------


def let_through(schema: Any, candidates: list[str]) -> tuple[set[str], bool]:
    """The candidates that the grammar of a schema lets through, and whether it follows all of the schema."""
    try:
        text, not_followed = grammar_of(json.dumps(schema))
    except SchemaError as error:
        assert "fits" in str(error), schema
        return set(), True
    return {each for each in candidates if expression(text).fullmatch(each)}, not not_followed


def valid(schema: Any, candidates: list[str]) -> set[str]:
    validator = jsonschema.Draft202012Validator(schema)
    return {each for each in candidates if validator.is_valid(json.loads(each))}


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_bounds_of_numbers_are_exact(kind: str) -> None:
    """Each number is written with the decimals of the bounds, and with two more beside an exclusive one."""
    chance = random.Random(2)
    for _ in range(150):
        schema: dict[str, Any] = {"type": kind}
        exact, bounds = 0, [Decimal(0)]
        for name in ("Minimum", "Maximum"):
            exclusive, decimals = chance.random() < 0.4, chance.choice([0, 0, 1, 2, 3])
            bound = Decimal(chance.choice([1, -1]) * (chance.randrange(chance.choice([9, 2000])) * 10 + 3)).scaleb(
                -decimals
            )
            bounds.append(bound)
            if chance.random() < 0.8:
                schema["exclusive" * exclusive + (name if exclusive else name.lower())] = (
                    float(bound) if decimals else int(bound)
                )
                exact = max(exact, decimals + 2 * exclusive)
        if kind == "integer":
            exact = 0
        steps = [Decimal(step) for step in (0, 1, 2, 9, 10, 100)] + [Decimal(step).scaleb(-exact) for step in (1, 5)]
        near = {
            (bound + sign * step).quantize(Decimal(1).scaleb(-exact))
            for bound in bounds
            for step in steps
            for sign in (1, -1)
        }
        texts = [f"{each:f}" for each in near] + [f"{int(each)}" for each in near if each == int(each)]
        found, followed = let_through(schema, texts)
        # Not with both "2" and "2.0" where one of them is let through.
        assert followed and set(map(Decimal, found)) == set(map(Decimal, valid(schema, texts))), schema


def test_lengths_of_arrays_and_their_items_are_exact() -> None:
    """Only arrays that have all of their first items, if they may have as many, are let through."""
    chance = random.Random(3)
    for _ in range(80):
        first = [{"const": number} for number in range(chance.randrange(4))]
        schema: dict[str, Any] = {"type": "array", "minItems": chance.randrange(5)}
        if first:
            schema["prefixItems"] = first
        if chance.random() < 0.7:
            schema["maxItems"] = schema["minItems"] + chance.randrange(4)
        closed: list[dict[str, Any]] = [{}, {"items": False}, {"items": {"const": 7}}, {"unevaluatedItems": False}]
        schema |= chance.choice(closed)
        arrays = [[*range(len(first)), *[rest] * 7][:length] for length in range(8) for rest in (7, 8)]
        candidates = [json.dumps(each) for each in arrays if len(each) >= min(len(first), schema.get("maxItems", 9))]
        found, followed = let_through(schema, candidates)
        assert followed and found == valid(schema, candidates), schema


def test_properties_are_let_through_in_their_order_and_with_those_that_are_required() -> None:
    chance = random.Random(4)
    for _ in range(120):
        names = "abc"[: chance.randrange(1, 4)]
        required = [name for name in names + "e" * chance.randrange(2) if chance.random() < 0.4]
        closed = chance.choice([{"additionalProperties": each} for each in (False, {"const": "e"})])
        closed = chance.choice([closed, {"unevaluatedProperties": False}])
        schema = {"properties": {name: {"const": name} for name in names}, "required": required} | closed
        chosen = [each for count in range(6) for each in itertools.combinations(names + "e", count)]
        members = [{name: name for name in each} for each in chosen] + [{"a": "b"}]
        candidates = [json.dumps(each) for each in members if "e" not in each or "e" in required]
        found, followed = let_through({"type": "object"} | schema, candidates)
        assert followed and found == valid({"type": "object"} | schema, candidates), schema
        backwards = [json.dumps(dict(reversed(each.items()))) for each in members if len(each) > 1]
        assert let_through({"type": "object"} | schema, backwards)[0] == set(), "in another order"


SCALARS = ["null", "true", "false", "0", "1", "5", "-1", "1.5", '""', '"a"', '"ab"', '"abc"']
TYPES = (["integer", "string"], ["number"], ["string", "null"], ["boolean", "null"], ["integer"], ["string"])
ASSERTIONS: list[dict[str, Any]] = [
    {},
    {"minimum": 1},
    {"maximum": 1},
    {"exclusiveMinimum": 0},
    {"minLength": 1},
    {"maxLength": 2},
    {"pattern": "^a"},
    {"enum": [1, "a", None, True]},
    {"const": "ab"},
    {"const": 0},
    {"title": "a", "default": 1},
]


def a_scalar(chance: random.Random) -> dict[str, Any]:
    return {"type": chance.choice(TYPES)} | chance.choice(ASSERTIONS) | chance.choice(ASSERTIONS)


def an_object(chance: random.Random) -> dict[str, Any]:
    properties = {name: {"const": chance.choice([1, 1, 2])} for name in "ab" if chance.random() < 0.6}
    closed: list[dict[str, Any]] = [{}, {"additionalProperties": False}, {"additionalProperties": True}]
    bounds: list[dict[str, Any]] = [{}, {"required": [*properties]}, {"required": ["a"]}, {"maxProperties": 1}]
    return {"type": "object", "properties": properties, **chance.choice(closed), **chance.choice(bounds)}


def a_schema(chance: random.Random, leaf: Callable[[random.Random], dict[str, Any]], depth: int = 2) -> Any:
    if depth and chance.random() < 0.6:
        name = chance.choice(["allOf", "anyOf", "oneOf"])
        items = [a_schema(chance, leaf, depth - 1) for _ in range(chance.randrange(1, 4))]
        return {name: items} | chance.choice([{}, {}, leaf(chance), {"description": "a"}])
    return chance.choice([True, False]) if chance.random() < 0.1 else leaf(chance)


def test_what_fits_several_schemas_is_let_through_and_nothing_else_where_all_of_them_is_followed() -> None:
    chance = random.Random(5)
    objects = [dict(each) for each in itertools.product(*[[("a", 1), ("a", 2), ("b", 1), ("c", 1)]] * 2)]
    for leaf, candidates in ((a_scalar, SCALARS), (an_object, list(map(json.dumps, [{}, *objects])))):
        followed_ones = 0
        for _ in range(200):
            schema = a_schema(chance, leaf)
            found, followed = let_through(schema, candidates)
            expected = valid(schema, candidates)
            assert found >= expected or leaf is an_object, schema
            assert found <= expected or not followed, schema
            followed_ones += followed
        assert followed_ones > 60


@by_rows(
    "characters",
    [
        *(r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", "[.]", "[^]", r"[\b]", r"[\^a]", r"\u0041", "é"),
        *("[a-c]", "[^a-c]", r"[\w-]", "[-a]", "[a-]", r"[^\d\s]", "[!-#]", r"[\[-\]]", r"[\t-\r]", r"[\0-~]"),
        *(r"[^\n]", '[^"]', r"[^\\]", "[~-¿]", "[^é]", "[\x7f-¿]", "[\x80-À]", "[éë-í]"),
    ],
)
def test_a_set_has_the_characters_of_the_same_set_in_a_regular_expression(characters: str) -> None:
    """But for control characters without a short escape, and many beyond ASCII of which some are left out."""
    try:
        text = Pattern(f"^{characters}$").text
        let_through = expression(f"{any_object()}\nroot ::= {text}".replace("root ::= object\n", ""))
    except PatternError as error:
        assert error.only_unsupported
        let_through = re.compile("(?!)")
    # A dot of ECMAScript stands for no line end of either kind.
    python = {".": r"[^\n\r]", "[^]": r"[\s\S]"}.get(characters, characters)
    plain = re.compile(python, re.ASCII)
    beyond = [bool(plain.fullmatch(chr(code))) for code in range(128, 512)]
    written_out = all(beyond) or sum(beyond) <= 64
    for code in [*map(ord, "\t\n\r"), *range(0x20, 0x100)]:
        inside = json.dumps(chr(code), ensure_ascii=False)[1:-1]
        expected = bool(plain.fullmatch(chr(code))) and (code < 128 or written_out)
        assert bool(let_through.fullmatch(inside)) == expected, hex(code)


def test_a_schema_has_at_most_20000_parts() -> None:
    for parts in (19_990, 20_010):
        schema = json.dumps({"type": "array", "prefixItems": [True] * parts})
        if parts < 20_000:
            assert grammar_of(schema).not_followed == ()
        else:
            with pytest.raises(SchemaError, match="over 20000 parts"):
                grammar_of(schema)
