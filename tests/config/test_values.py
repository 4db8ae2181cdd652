from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from djl_trtllm.config.options.choices import Backend
from djl_trtllm.config.options.option import NotAValueError, Option, ValueType, as_text, is_quoted, without_comment
from tests.config.helpers import from_text, problems_of
from tests.support.tables import by_table, table


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("option.max_input_len=lots", "a whole number (tokens), at least 1"),
        ("option.max_input_len=" + "9" * 5000, "a whole number"),
        ("option.predict_timeout=nan", "a number (seconds), greater than 0"),
        ("option.backend=tensorflow", "one of auto, tensorrt, pytorch"),
        ("inference_port=65536", "at most 65535"),
    ],
)
def test_a_wrong_value_names_key_value_place_and_expectation(line: str, expected: str) -> None:
    (problem,) = problems_of(f"# one line before\n{line}")
    key, _, value = line.partition("=")
    assert problem.startswith(f"{key}={value[:20]}")
    assert "serving.properties:2" in problem
    assert expected in problem


def test_old_rolling_batch_names_are_accepted() -> None:
    for word in ("auto", "trtllm", "disable", "vllm", "lmi-dist", "deepspeed", "scheduler"):
        assert from_text(f"option.rolling_batch={word}").options.rolling_batch == word
    for word in ("trt-llm", "TensorRT-LLM", "trt_llm"):
        assert from_text(f"option.rolling_batch={word}").options.rolling_batch == "trtllm"


# -- Each type of value by itself: what it is called, what it takes, and how values are written --


FREE = Option("option.x", "d")
BOUND = Option("option.x", "d", unit="tokens", at_least=1)
WORDS = ValueType(str, words=("NONE", "Some"))
ALIASED = Option("option.x", "d", value_aliases={"ov": "openvino"})

TYPES = {
    **{kind.__name__: ValueType(kind) for kind in (int, float, bool, str, Path, Backend)},
    "words": WORDS,
    "int or max": ValueType(int, keywords=("max",)),
    "int, max or auto": ValueType(int, keywords=("max", "auto")),
    **{f"{kind.__name__} or nothing": ValueType(kind, optional=True) for kind in (int, str)},
    **{f"{kind.__name__}s": ValueType(kind, many=True) for kind in (int, float, str)},
    "floats or nothing": ValueType(float, many=True, optional=True),
}
"""What the tables call a type."""


def read(kind: str, value: Any) -> Any:
    """A value of a table as one of its type."""
    if kind in ("Path", "Backend"):
        return TYPES[kind].base(value)
    return tuple(value) if isinstance(value, list) else value


def parse(kind: type | ValueType, text: str, option: Option = FREE) -> Any:
    return (kind if isinstance(kind, ValueType) else ValueType(kind)).parse(text, option)


def test_a_type_is_read_from_the_annotation_of_a_field() -> None:
    read = {
        int: ValueType(int),
        int | None: ValueType(int, optional=True),
        int | Literal["max", "auto"]: ValueType(int, keywords=("max", "auto")),
        float | Literal["max"] | None: ValueType(float, True, ("max",)),
        Backend | None: ValueType(Backend, optional=True),
        Literal["NONE", "Some"] | None: ValueType(str, optional=True, words=("NONE", "Some")),
        tuple[int, ...]: ValueType(int, many=True),
        tuple[str, ...] | None: ValueType(str, optional=True, many=True),
        list[int] | str | Literal["max"]: ValueType(str, keywords=("max",)),
    }
    assert {annotation: ValueType.of(annotation) for annotation in read} == read


@by_table("kind", "bound", "text")
def test_a_type_says_what_a_value_has_to_be(kind: str, bound: bool, text: str) -> None:
    assert TYPES[kind].describe(BOUND if bound else FREE) == text


@by_table("kind", "text", "value")
def test_a_text_means_a_value(kind: str, text: str, value: object) -> None:
    parsed, expected = parse(TYPES[kind], text), read(kind, value)
    assert parsed == expected and type(parsed) is type(expected)


@pytest.mark.parametrize(("kind", "text"), [*table(__file__, "texts_that_mean_none"), ("ints", "[" * 100_000)])
def test_a_text_that_means_none_is_refused_with_what_is_expected(kind: str, text: str) -> None:
    with pytest.raises(NotAValueError) as caught:
        parse(TYPES[kind], text)
    assert str(caught.value) == f"expected {TYPES[kind].describe(FREE)}"


def test_a_number_out_of_bounds_is_refused_wherever_it_stands() -> None:
    for kind, text in ((ValueType(int), "0"), (ValueType(float), "0.5"), (ValueType(int, many=True), "1,0")):
        with pytest.raises(NotAValueError, match="at least 1"):
            parse(kind, text, BOUND)
    assert parse(int, "1", BOUND) == 1


def test_a_nul_character_is_refused_in_any_type() -> None:
    for kind in (int, str, Path, Backend):
        with pytest.raises(NotAValueError, match="without NUL characters"):
            parse(kind, "a\0b")


@by_table("text", "hint")
def test_a_hint_says_what_is_too_much(text: str, hint: str) -> None:
    with pytest.raises(NotAValueError) as caught:
        parse(int, text)
    assert str(caught.value) == f"expected a whole number{hint}"


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        *table(__file__, "values_of_a_program"),
        ("Path", Path("/a"), "/a"),
        ("Backend", Backend.OPENVINO, "openvino"),
        ("ints", (1,), [1]),
    ],
)
def test_a_value_of_a_program_is_taken(kind: str, given: object, value: object) -> None:
    checked, expected = TYPES[kind].check(given, FREE), read(kind, value)
    assert checked == expected and type(checked) is type(expected)


@pytest.mark.parametrize(("kind", "given"), [*table(__file__, "values_of_a_program_refused"), ("ints", {1})])
def test_a_value_of_a_program_that_is_none_is_refused(kind: str, given: object) -> None:
    with pytest.raises(NotAValueError, match="expected "):
        TYPES[kind].check(given, BOUND)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (True, "true"),
        (False, "false"),
        (3, "3"),
        (3.0, "3"),
        (-3.0, "-3"),
        (1e14, "100000000000000"),
        (1e15, "1e+15"),
        (0.1, "0.1"),
        (0.1234567, "0.1234567"),
        (1e-7, "1e-07"),
        ((1, 2.5, "a"), "1,2.5,a"),
        ([], ""),
        (Backend.OPENVINO, "openvino"),
        (Path("/a"), "/a"),
        ("a", "a"),
    ],
)
def test_a_value_is_written_as_in_a_properties_file(value: object, text: str) -> None:
    assert as_text(value) == text


def test_quotes_are_two_of_one_kind_and_a_comment_begins_with_a_hash_behind_a_blank() -> None:
    assert all(map(is_quoted, ('"a"', "'a'", ' "a" ', '""')))
    assert not any(map(is_quoted, ('"', "\"a'", "a", "", "XaX")))
    assert without_comment("8 # most") == without_comment("8\t#most\nof all") == "8"
    assert [without_comment(text) for text in ("a#b", "#b")] == ["a#b", "#b"]


def test_words_and_their_aliases_are_taken_in_either_case() -> None:
    assert parse(Backend, "OV", ALIASED) is Backend.OPENVINO
    with pytest.raises(NotAValueError):
        parse(Backend, "ov")
    assert ValueType(str).is_text and ValueType(Path).is_text
    assert not any(each.is_text for each in (ValueType(str, many=True), ValueType(int), ValueType(Backend), WORDS))
