from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from djl_trtllm.config.options.choices import Backend
from djl_trtllm.config.options.option import NotAValueError, Option, ValueType, as_text, is_quoted, without_comment
from tests.config.helpers import from_text, problems_of


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


@pytest.mark.parametrize(
    ("kind", "option", "text"),
    [
        (ValueType(int), FREE, "a whole number"),
        (ValueType(int), BOUND, "a whole number (tokens), at least 1"),
        (ValueType(float), BOUND, "a number (tokens), at least 1"),
        (ValueType(float), FREE, "a number"),
        (ValueType(int, keywords=("max", "auto")), BOUND, "a whole number (tokens), at least 1 or max or auto"),
        (ValueType(bool), BOUND, "true or false"),
        (ValueType(str), BOUND, "text"),
        (ValueType(Path), BOUND, "a path"),
        (WORDS, FREE, "one of NONE, Some"),
        (ValueType(int, many=True), BOUND, "whole numbers (tokens) with commas between them, each at least 1"),
        (ValueType(float, many=True), FREE, "numbers with commas between them"),
        (ValueType(str, many=True), FREE, "names with commas between them"),
    ],
)
def test_a_type_says_what_a_value_has_to_be(kind: ValueType, option: Option, text: str) -> None:
    assert kind.describe(option) == text


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, " 42 ", 42),
        (int, "-7", -7),
        (int, "+7", 7),
        (int, "9" * 18, int("9" * 18)),
        (float, "1", 1.0),
        (float, "-1.5", -1.5),
        (float, ".5", 0.5),
        (float, "5.", 5.0),
        (float, "1e3", 1000.0),
        (float, "1.5E-3", 0.0015),
        (float, "1e+100", 1e100),
        *((bool, word, True) for word in ("true", "TRUE", "1", "Yes", "enable")),
        *((bool, word, False) for word in ("false", "no", "disable")),
        (bool, "on", True),
        (bool, "OFF", False),
        (bool, "0", False),
        (str, " a b ", "a b"),
        (str, "none", "none"),
        (Path, "/a", Path("/a")),
        (Backend, "OpenVINO", Backend.OPENVINO),
        (WORDS, "none", "NONE"),
        (WORDS, "SOME", "Some"),
        (ValueType(int, keywords=("max",)), "MAX", "max"),
        (ValueType(int, optional=True), "None", None),
        (ValueType(int, optional=True), "null", None),
        (ValueType(str, optional=True), "none", "none"),
        (ValueType(int, many=True), "1, 2", (1, 2)),
        (ValueType(int, many=True), "1,", (1,)),
        (ValueType(int, many=True), "[1, 2]", (1, 2)),
        (ValueType(str, many=True), '["a", "b"]', ("a", "b")),
        (ValueType(str, many=True), '["a,b"]', ("a,b",)),
        (ValueType(str, many=True), "a , b", ("a", "b")),
        (ValueType(float, many=True), "[-1200.0, 3]", (-1200.0, 3.0)),
        (ValueType(float, many=True, optional=True), "none", None),
    ],
)
def test_a_text_means_a_value(kind: type | ValueType, text: str, value: object) -> None:
    parsed = parse(kind, text)
    assert parsed == value and type(parsed) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, ""),
        (int, "1.0"),
        (int, "1e3"),
        (int, "0x10"),
        (int, "none"),
        (int, "9" * 19),
        (int, "\uff11"),
        (float, "."),
        (float, "inf"),
        (float, "nan"),
        (float, "1e999"),
        (float, "1e1000"),
        (float, "9" * 19),
        (float, "1_0.5"),
        (bool, "2"),
        (bool, "t"),
        (Backend, "lmi"),
        (WORDS, "other"),
        (ValueType(int, keywords=("max",)), "min"),
        (ValueType(int, many=True), ""),
        (ValueType(int, many=True), ","),
        (ValueType(int, many=True), "1,,2"),
        (ValueType(int, many=True), "[]"),
        (ValueType(int, many=True), "[1"),
        (ValueType(int, many=True), "[" * 100_000),
        (ValueType(int, many=True), "[true]"),
        (ValueType(int, many=True), "[[1]]"),
        (ValueType(str, many=True), "[{}]"),
        (ValueType(str, many=True), '["a", true]'),
        (ValueType(str, many=True), '["a", ["b"]]'),
        (ValueType(str, many=True), '["a", " "]'),
    ],
)
def test_a_text_that_means_none_is_refused_with_what_is_expected(kind: type | ValueType, text: str) -> None:
    described = (kind if isinstance(kind, ValueType) else ValueType(kind)).describe(FREE)
    with pytest.raises(NotAValueError) as caught:
        parse(kind, text)
    assert str(caught.value) == f"expected {described}"


def test_a_number_out_of_bounds_is_refused_wherever_it_stands() -> None:
    for kind, text in ((ValueType(int), "0"), (ValueType(float), "0.5"), (ValueType(int, many=True), "1,0")):
        with pytest.raises(NotAValueError, match="at least 1"):
            parse(kind, text, BOUND)
    assert parse(int, "1", BOUND) == 1


def test_a_nul_character_is_refused_in_any_type() -> None:
    for kind in (int, str, Path, Backend):
        with pytest.raises(NotAValueError, match="without NUL characters"):
            parse(kind, "a\0b")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('"256"', ", without quotes"),
        ("'256'", ", without quotes"),
        ("4_096", ", in digits only"),
        ("4,096", ", in digits only"),
        ("4,,096", ""),
        ('"', ""),
    ],
)
def test_a_hint_says_what_is_too_much(text: str, hint: str) -> None:
    with pytest.raises(NotAValueError) as caught:
        parse(int, text)
    assert str(caught.value) == f"expected a whole number{hint}"


@pytest.mark.parametrize(
    ("kind", "given", "value"),
    [
        (ValueType(int), 3, 3),
        (ValueType(int), "3", 3),
        (ValueType(float), 3, 3.0),
        (ValueType(float), 2.5, 2.5),
        (ValueType(bool), True, True),
        (ValueType(bool), "yes", True),
        (ValueType(str), " a ", " a "),
        (ValueType(Path), "/a", Path("/a")),
        (ValueType(Path), Path("/a"), Path("/a")),
        (ValueType(Backend), "openvino", Backend.OPENVINO),
        (ValueType(Backend), Backend.OPENVINO, Backend.OPENVINO),
        (WORDS, "some", "Some"),
        (ValueType(int, optional=True), None, None),
        (ValueType(int, keywords=("max",)), "max", "max"),
        (ValueType(int, many=True), [1, 2], (1, 2)),
        (ValueType(int, many=True), (1,), (1,)),
        (ValueType(int, many=True), "1,2", (1, 2)),
        (ValueType(float, many=True), [1], (1.0,)),
    ],
)
def test_a_value_of_a_program_is_taken(kind: ValueType, given: object, value: object) -> None:
    checked = kind.check(given, FREE)
    assert checked == value and type(checked) is type(value)


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (ValueType(int), 2.0),
        (ValueType(int), True),
        (ValueType(int), None),
        (ValueType(int), 0),
        (ValueType(float), True),
        (ValueType(float), 0.5),
        (ValueType(bool), 1),
        (ValueType(str), 3),
        (ValueType(Path), 3),
        (ValueType(Backend), 3),
        (WORDS, "other"),
        (WORDS, 3),
        (ValueType(int, many=True), []),
        (ValueType(int, many=True), 3),
        (ValueType(int, many=True), [1, 0]),
        (ValueType(int, many=True), [1, None]),
        (ValueType(int, many=True), {1}),
    ],
)
def test_a_value_of_a_program_that_is_none_is_refused(kind: ValueType, given: object) -> None:
    with pytest.raises(NotAValueError, match="expected "):
        kind.check(given, BOUND)


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
