"""The declarations of all options, as tables: what holds of every row."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from djl_trtllm.config import Options
from djl_trtllm.config.options import GROUPS, OPTIONS, find, suggest
from djl_trtllm.config.options.choices import Backend, Choice, OptionTypes
from djl_trtllm.config.options.option import (
    NotAValueError,
    Option,
    Scope,
    ValueType,
    as_text,
    is_quoted,
    option_of,
    without_comment,
)
from djl_trtllm.errors import ConfigError
from djl_trtllm.files import read_table
from tests.config.helpers import from_text, problems_of
from tests.support.tables import by_rows, by_table, table


def test_every_field_is_declared_once() -> None:
    assert len(OPTIONS) > 300
    assert set(OPTIONS) == set(vars(Options()))
    assert sum(len(group.fields) for group in GROUPS) == len(OPTIONS)
    # A type has its row in TOML, and stands in the order of the rows.
    assert list(OptionTypes.__annotations__) == [name for name in OPTIONS if name in OptionTypes.__annotations__]
    rows = {name: row for file in ("model", "engine", "server") for name, row in _rows(file)}
    assert [name for name in OptionTypes.__annotations__ if "type" in rows[name]] == []


def _rows(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for group in read_table(f"{file}.toml", "djl_trtllm.config.options").values():
        yield from ((name, row) for name, row in group.items() if isinstance(row, dict))


def test_every_option_is_documented() -> None:
    lacking = [
        name
        for name, declared in OPTIONS.items()
        if not declared.option.description.endswith(".") or not declared.option.source or not declared.example
    ]
    assert lacking == []


def test_defaults_and_examples_are_values_of_their_options() -> None:
    wrong = []
    for name, declared in OPTIONS.items():
        try:
            declared.type.parse(declared.example, declared.option)
            same = declared.type.check(declared.default, declared.option) == declared.default
            if declared.default is not None:
                same = same and declared.type.parse(as_text(declared.default), declared.option) == declared.default
        except NotAValueError as error:
            wrong.append(f"{name}: {error}")
        else:
            wrong += [] if same else [f"{name}: {declared.default}"]
    assert wrong == []


def test_a_value_alias_is_a_further_word_for_a_value() -> None:
    aliases = [
        (declared, word, value)
        for declared in OPTIONS.values()
        for word, value in declared.option.value_aliases.items()
    ]
    assert len(aliases) > 20
    wrong = []
    for declared, word, value in aliases:
        meaning = declared.type.parse(word, declared.option)
        if meaning is None or meaning != declared.type.parse(value, declared.option) or word in declared.type.choices:
            wrong.append((declared.name, word))
    assert wrong == []


def test_every_word_of_a_closed_set_is_taken_in_either_case() -> None:
    words = [
        (declared, choice, text)
        for declared in OPTIONS.values()
        if declared.option.scope is not Scope.OPERATOR
        for choice in declared.type.choices
        for text in (choice, choice.lower(), choice.upper())
    ]
    assert len(words) > 400
    wrong = []
    for declared, choice, text in words:
        value = getattr(from_text(f"{declared.key}={text}").options, declared.name)
        if value != choice:
            wrong.append((declared.name, text, value))
    assert wrong == []


def test_only_the_operator_decides_about_foreign_code_adapters_keys_certificates_and_where_traces_and_records_go() -> (
    None
):
    operators = "install_requirements adapter_roots api_key api_keys_file cors_allowed_origin certificate_file "
    operators += (
        "private_key_file client_ca_file otlp_traces_endpoint record_file record_share record_prompts record_max_bytes"
    )
    of_scope = {scope: [each for each in OPTIONS.values() if each.option.scope is scope] for scope in Scope}
    assert [declared.name for declared in of_scope[Scope.OPERATOR]] == operators.split()
    servers = [spelling for declared in of_scope[Scope.SERVER] for spelling in declared.spellings]
    assert len(servers) > 20 and not any(spelling.startswith("option.") for spelling in servers)


def test_bounds_include_or_exclude_their_number() -> None:
    closed = Option("k", "d", at_least=1, at_most=3)
    assert [number for number in (0.9, 1, 2, 3, 3.1) if closed.allows(number)] == [1, 2, 3]
    open_ = Option("k", "d", above=1, below=3)
    assert [number for number in (1, 1.1, 2.9, 3) if open_.allows(number)] == [1.1, 2.9]
    assert Option("k", "d").allows(-1e9)
    powers = Option("k", "d", power_of_two=True)
    assert [number for number in (1, 2, 3, 48, 64, 65) if powers.allows(number)] == [1, 2, 64]
    assert [number for number in (-1, 0, 5) if Option("k", "d", at_least=0).allows(number)] == [0, 5]
    assert [number for number in (-1, 0, 5) if Option("k", "d", at_most=0).allows(number)] == [-1, 0]


def test_an_option_says_its_range_and_its_effect_and_without_one_what_happens_instead() -> None:
    bounds: list[tuple[dict[str, Any], str]] = [
        ({"at_least": 1, "at_most": 65535}, "at least 1 and at most 65535"),
        ({"above": 0, "below": 1}, "greater than 0 and less than 1"),
        ({"at_least": 1, "power_of_two": True}, "a power of two and at least 1"),
        ({}, ""),
    ]
    assert [Option("k", "d", **bound).range_text for bound, _ in bounds] == [text for _, text in bounds]
    assert Option("k", "d", effect="E").effect_everywhere == "E"
    assert Option("k", "d").effect_everywhere == "" and Option("k", "d").scope is Scope.MODEL
    assert Option("k", "d", legacy="use another").effect_everywhere == "no effect: use another"
    assert Option("k", "d", legacy="use another", warn=True).effect_everywhere == "no effect any more: use another"


def test_a_row_has_the_key_of_its_field_and_bounds_for_counts_amounts_and_devices() -> None:
    row = {"description": "Tokens.", "default": 7, "aliases": ["option.length"], "count": "tokens"}
    assert option_of("tokens", row) == Option(
        "option.tokens", "Tokens.", unit="tokens", at_least=1, aliases=("option.length",)
    )
    row = {"description": "A port.", "prefix": "", "scope": "server", "legacy": "nothing"}
    assert option_of("port", row) == Option("port", "A port.", scope=Scope.SERVER, legacy="nothing")
    assert option_of("port", {**row, "key": "its_port"}).key == "its_port"
    bounds = [option_of("n", {"description": "N.", kind: "u"}).range_text for kind in ("amount", "devices")]
    assert bounds == ["greater than 0", "at least 1 and at most 65536"]


def test_a_choice_is_its_word() -> None:
    assert str(Backend.OPENVINO) == Backend.OPENVINO.value == "openvino"
    words = {kind: [member.value.lower() for member in kind] for kind in Choice.__subclasses__()}
    assert len(words) > 10
    assert {kind: all_ for kind, all_ in words.items() if len(set(all_)) < len(all_)} == {}


def test_every_spelling_finds_its_option_only() -> None:
    assert sum(len(declared.option.aliases) for declared in OPTIONS.values()) > 50
    assert [
        spelling for declared in OPTIONS.values() for spelling in declared.spellings if find(spelling) is not declared
    ] == []


@by_table("key", "suggestion")
def test_suggestions(key: str, suggestion: str | None) -> None:
    assert suggest(key) == suggestion


# -- Options without effect --


LEGACY = [declared for declared in OPTIONS.values() if declared.option.legacy]


def test_a_value_is_held_against_the_type_and_range_of_its_row() -> None:
    assert vars(from_text("minWorkers=2").options)["min_workers"] == 2
    with pytest.raises(ConfigError, match="a whole number \\(processes\\), at least 0"):
        from_text("minWorkers=-1")
    assert vars(from_text("option.auto_parallel_world_size=none").options)["auto_parallel_world_size"] is None
    assert vars(from_text("option.logits_dtype=FLOAT16").options)["logits_dtype"] == "float16"
    with pytest.raises(ConfigError, match="one of float16, float32"):
        from_text("option.logits_dtype=float8")


def test_what_to_use_instead_exists() -> None:
    assert len(LEGACY) > 110
    named = {key for declared in LEGACY for key in re.findall(r"option\.\w+", declared.option.legacy)}
    assert named and {key for key in named if find(key) is None or find(key) in LEGACY} == set()


# -- Every name that the documents of LMI, TensorRT-LLM, Triton and Truss have is an option here --


DOCUMENTED: dict[str, str] = json.loads((Path(__file__).parent / "documented.json").read_text(encoding="utf-8"))
"""The names of options in each document, with blanks between them; those of the server have no prefix."""


def test_every_documented_name_is_an_option() -> None:
    names = {
        (key if name == "server_keys" else f"option.{key}") for name in DOCUMENTED for key in DOCUMENTED[name].split()
    }
    assert len(names) > 290
    assert [name for name in sorted(names) if find(name) is None] == []


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


@by_rows(("kind", "text"), [*table(__file__, "texts_that_mean_none"), ("ints", "[" * 100_000)])
def test_a_text_that_means_none_is_refused_with_what_is_expected(kind: str, text: str) -> None:
    with pytest.raises(NotAValueError) as caught:
        parse(TYPES[kind], text)
    assert str(caught.value) == f"expected {TYPES[kind].describe(FREE)}"


def test_a_number_out_of_bounds_is_refused_wherever_it_stands() -> None:
    for kind, text in ((ValueType(int), "0"), (ValueType(float), "0.5"), (ValueType(int, many=True), "1,0")):
        with pytest.raises(NotAValueError, match="at least 1"):
            parse(kind, text, BOUND)
    assert parse(int, "1", BOUND) == 1


def test_a_nul_character_is_refused_in_any_type_and_what_is_not_utf8_but_in_paths() -> None:
    for kind in (int, str, Path, Backend):
        with pytest.raises(NotAValueError, match="without NUL characters"):
            parse(kind, "a\0b")
    for text in ("caf\udce9", "\ud800"):  # a byte of the environment, and an escape of a file
        with pytest.raises(NotAValueError, match="in UTF-8"):
            parse(str, text)
        assert parse(Path, text) == Path(text)


@by_table("text", "hint")
def test_a_hint_says_what_is_too_much(text: str, hint: str) -> None:
    with pytest.raises(NotAValueError) as caught:
        parse(int, text)
    assert str(caught.value) == f"expected a whole number{hint}"


@by_rows(
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


@by_rows(("kind", "given"), [*table(__file__, "values_of_a_program_refused"), ("ints", {1})])
def test_a_value_of_a_program_that_is_none_is_refused(kind: str, given: object) -> None:
    with pytest.raises(NotAValueError, match="expected "):
        TYPES[kind].check(given, BOUND)


@by_rows(
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
