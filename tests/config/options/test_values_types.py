"""Each type of value by itself: what it is called, what it takes, and how values are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from djl_trtllm.config.options.choices import Backend, EmbeddingParallelMode
from djl_trtllm.config.options.option import Option
from djl_trtllm.config.options.values import NotAValueError, ValueType, as_text, is_quoted, without_comment

FREE = Option("option.x", "d")
BOUND = Option("option.x", "d", unit="tokens", at_least=1)
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
        tuple[int, ...]: ValueType(int, many=True),
        tuple[str, ...] | None: ValueType(str, optional=True, many=True),
        list[int] | str | Literal["max"]: ValueType(str, keywords=("max",)),
    }
    assert {annotation: ValueType.of(annotation) for annotation in read} == read


def test_only_single_texts_and_paths_are_text() -> None:
    assert ValueType(str).is_text and ValueType(Path).is_text
    for other in (ValueType(str, many=True), ValueType(int), ValueType(Backend)):
        assert not other.is_text


def test_choices_are_the_words_of_an_enum() -> None:
    assert ValueType(EmbeddingParallelMode).choices == ("NONE", "SHARDING_ALONG_VOCAB", "SHARDING_ALONG_HIDDEN")
    assert ValueType(int).choices == ValueType(str).choices == ()


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
        (ValueType(EmbeddingParallelMode), FREE, "one of NONE, SHARDING_ALONG_VOCAB, SHARDING_ALONG_HIDDEN"),
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
        (bool, "Yes", True),
        (bool, "on", True),
        (bool, "OFF", False),
        (bool, "0", False),
        (str, " a b ", "a b"),
        (str, "none", "none"),
        (Path, "/a", Path("/a")),
        (Backend, "OpenVINO", Backend.OPENVINO),
        (EmbeddingParallelMode, "none", EmbeddingParallelMode.NONE),
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
        (Backend, "vllm"),
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


def test_an_alias_is_a_further_word_in_either_case() -> None:
    assert parse(Backend, "OV", ALIASED) is Backend.OPENVINO
    with pytest.raises(NotAValueError):
        parse(Backend, "ov")


# -- values that a program gives ---------------------------------------------------------------------------------------


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


# -- how values are written --------------------------------------------------------------------------------------------


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


def test_quotes_are_two_of_one_kind_around_a_text() -> None:
    assert [text for text in ('"a"', "'a'", ' "a" ', '""', '"', "\"a'", "a", "", "XaX") if is_quoted(text)] == [
        '"a"',
        "'a'",
        ' "a" ',
        '""',
    ]


def test_a_comment_begins_with_a_hash_behind_a_blank() -> None:
    assert without_comment("8 # most") == without_comment("8\t#most\nof all") == "8"
    assert without_comment("a#b") == "a#b"
    assert without_comment("#b") == "#b"
