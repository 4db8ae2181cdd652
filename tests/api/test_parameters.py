"""Kinds of values, and tables of parameters by which requests are read."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.api import parameters
from djl_trtllm.api.base import RawRequest
from djl_trtllm.api.parameters import (
    BOOLEAN,
    IGNORED,
    LONGEST_STRING,
    OBJECT,
    PROMPT,
    STRINGS,
    STRINGS_OR_NONE,
    TEXT,
    TOKEN_IDS,
    UNSUPPORTED,
    Kind,
    Parameter,
    Problems,
    Table,
    check_text,
    integer,
    number,
    read_object,
    show,
)
from djl_trtllm.api.sampling import SAMPLING
from djl_trtllm.config import Options
from djl_trtllm.config.options.choices import UnknownParameters
from djl_trtllm.errors import InvalidRequestError, UnsupportedParameterError
from tests.api.models import PlayedModel, load
from tests.support.tables import by_rows

TABLE = Table(
    (
        Parameter(("top_k", "k"), integer(0), "top_k"),
        Parameter(("stop", "stop_sequences"), STRINGS, "stop", union=True),
    ),
    (
        Parameter(("model",), target=IGNORED),
        Parameter(("watermark",), neutral=(False,)),
        Parameter(("tool_choice",), neutral=("none", 0), advice="there are no tools"),
        Parameter(("cached",)),
    ),
    elsewhere={"stream": "beside 'parameters'"},
)


# -- kinds -------------------------------------------------------------------------------------------------------------

SIXTY_FOUR = [str(i) for i in range(64)]
INF, NAN = float("inf"), float("nan")
TAKEN: list[tuple[Kind, list[tuple[object, object]]]] = [
    (integer(1), [(1, 1), (2**70, 2**70)]),
    (integer(0, 3), [(0, 0), (3, 3)]),
    (number(0), [(0, 0.0), (0.0, 0.0)]),
    (number(-2, 2), [(-2, -2.0), (2.0, 2.0)]),
    (number(0, 1, above=True), [(1, 1.0)]),
    (number(0, above=True), [(1e308, 1e308), (2e-38, 2e-38)]),
    (BOOLEAN, [(True, True), (False, False)]),
    (TEXT, [("", "")]),
    (STRINGS, [("a", ("a",)), ([], ()), (["a", "b", "a"], ("a", "b")), (SIXTY_FOUR, tuple(SIXTY_FOUR))]),
    (STRINGS_OR_NONE, [("", ()), ([], ()), (["a"], ("a",))]),
    (TOKEN_IDS, [([3, 0, 2**31 - 1, 3], (3, 0, 2**31 - 1)), ([*range(1024)], (*range(1024),)), ([], ())]),
    (OBJECT, [({"a": 1}, {"a": 1})]),
]
REFUSED: list[tuple[Kind, list[object]]] = [
    (integer(1, 3), [0, 4]),
    (integer(1), [True, 1.5, 2.0**53, INF, NAN, [1], "one"]),
    (number(0, 1), [-0.001, 1.001, True, [0]]),
    (number(0, 1, above=True), [0]),
    (number(0, above=True), [0.0, 1e-300, 1e-40]),
    (number(0), [INF, NAN]),
    (number(-1), [-INF]),
    (BOOLEAN, [1, "maybe", '"', "[1]"]),
    (TEXT, [3]),
    (STRINGS, ["", [""], [1], {"a": 1}, [*SIXTY_FOUR, "x"]]),
    (STRINGS_OR_NONE, [[""], 0]),
    (TOKEN_IDS, [3, [-1], [2**31], [True], [1.0], ["1"], [*range(1025)]]),
    (OBJECT, [[]]),
]


@by_rows(("kind", "values"), TAKEN)
def test_a_kind_takes_its_values(kind: Kind, values: list[tuple[object, object]]) -> None:
    for given, value in values:
        found = kind.read(given)
        assert found == value and type(found) is type(value)


@by_rows(("kind", "values"), REFUSED)
def test_a_kind_refuses_other_values(kind: Kind, values: list[object]) -> None:
    for given in values:
        with pytest.raises(ValueError, match=r"^$"):
            kind.read(given)


@by_rows(
    ("kind", "given", "hint"),
    [
        (integer(1), 5.0, " (written without a decimal point: 5)"),
        (integer(1), -3.0, " (written without a decimal point: -3)"),
        (integer(1), 2.0**53 - 1, f" (written without a decimal point: {2**53 - 1})"),
        (integer(1), "5", " (written without quotation marks)"),
        (number(0), "0.5", " (written without quotation marks)"),
        (BOOLEAN, "True", " (written without quotation marks)"),
        (BOOLEAN, "false", " (written without quotation marks)"),
    ],
)
def test_a_value_of_another_json_type_gets_a_hint(kind: Kind, given: object, hint: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind.read(given)
    assert str(caught.value) == hint


WORD = {"type": "string", "minLength": 1, "maxLength": LONGEST_STRING}


@by_rows(
    ("kind", "expected", "schema"),
    [
        (integer(1), "an integer of at least 1", {"type": "integer", "minimum": 1}),
        (integer(1, 3), "an integer from 1 to 3", {"type": "integer", "minimum": 1, "maximum": 3}),
        (number(0.5), "a number of at least 0.5", {"type": "number", "minimum": 0.5}),
        (number(0, above=True), "a number greater than 0", {"type": "number", "exclusiveMinimum": 0}),
        (number(-2, 2), "a number from -2 to 2", {"type": "number", "minimum": -2, "maximum": 2}),
        (
            number(0, 1, above=True),
            "a number greater than 0 and at most 1",
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        ),
        (BOOLEAN, "true or false", {"type": "boolean"}),
        (OBJECT, "an object", {"type": "object"}),
        (TEXT, "a string", {"type": "string"}),
        (
            TOKEN_IDS,
            "a list of up to 1024 token ids",
            {"type": "array", "items": integer(0, 2**31 - 1).schema, "maxItems": 1024},
        ),
        (
            STRINGS,
            "a string or a list of up to 64 strings, none of them empty",
            {"anyOf": [WORD, {"type": "array", "items": WORD, "maxItems": 64}]},
        ),
        (
            STRINGS_OR_NONE,
            "a string or a list of up to 64 strings, none in the list empty",
            {"anyOf": [TEXT.schema, {"type": "array", "items": WORD, "maxItems": 64}]},
        ),
    ],
)
def test_a_kind_says_what_it_expects(kind: Kind, expected: str, schema: object) -> None:
    assert (kind.expected, kind.schema) == (expected, schema)


# -- tables ------------------------------------------------------------------------------------------------------------


DIFFER = "mean the same and have different values: give one"
NEUTRAL = "and values other than false are not supported by this backend"
CHOICES = 'and values other than "none" or 0 are not supported by this backend: there are no tools'


@by_rows(
    ("given", "values", "invalid", "unsupported"),
    [
        *(({name: 3}, {"top_k": 3}, [], []) for name in ("top_k", "k")),
        ({"top_k": None, "watermark": None, "nonsense": None}, {}, [], []),
        ({"model": [1, 2]}, {}, [], []),
        ({"top_k": 3, "k": 3}, {"top_k": 3}, [], []),
        ({"top_k": 3, "k": 4}, {"top_k": 3}, [f"'k' and 'top_k' {DIFFER}"], []),
        ({"k": 4, "top_k": 3}, {"top_k": 4}, [f"'top_k' and 'k' {DIFFER}"], []),
        ({"stop": ["a", "b"], "stop_sequences": ["b", "c"]}, {"stop": ("a", "b", "c")}, [], []),
        ({"k": -1, "stop": "a"}, {"stop": ("a",)}, ["'k' is -1: expected an integer of at least 0"], []),
        ({"k": 5.0}, {}, ["'k' is 5.0: expected an integer of at least 0 (written without a decimal point: 5)"], []),
        # What cannot be honoured is taken where it changes nothing, also as an equal number of another type.
        *((given, {}, [], []) for given in ({"watermark": False}, {"tool_choice": "none"})),
        *((given, {}, [], []) for given in ({"tool_choice": 0}, {"tool_choice": 0.0})),
        ({"watermark": True}, {}, [], [f"'watermark' is true, {NEUTRAL}"]),
        ({"watermark": 1}, {}, [], [f"'watermark' is 1, {NEUTRAL}"]),
        ({"tool_choice": False}, {}, [], [f"'tool_choice' is false, {CHOICES}"]),
        ({"cached": False}, {}, [], ["'cached' is false, and it is not supported by this backend"]),
        ({"top_q": 1}, {}, ["unknown parameter \"top_q\", did you mean 'top_k'?"], []),
        ({"qqqq": 1}, {}, ['unknown parameter "qqqq"'], []),
        ({"stream": True}, {}, ["'stream' belongs beside 'parameters'"], []),
        ({"b" * 100_000: 1}, {}, [f'unknown parameter "{"b" * 79}…'], []),
    ],
)
def test_values_are_read_by_target_or_reported_by_name(
    given: dict[str, Any], values: object, invalid: list[str], unsupported: list[str]
) -> None:
    problems = Problems()
    assert TABLE.read(given, problems, "parameter") == values
    assert (problems.invalid, problems.unsupported) == (invalid, unsupported)


def test_a_table_without_names_of_other_places_knows_none() -> None:
    problems = Problems()
    assert Table((Parameter(("a",), TEXT, "a"),)).read({"stream": 1}, problems, "field") == {}
    assert problems.invalid == ['unknown field "stream"']


# -- problems ----------------------------------------------------------------------------------------------------------


DIGITS = [*"0123456789"]


@by_rows(
    ("problems", "error"),
    [
        (Problems(["a", "b"], ["c"]), "a; b; c"),
        (Problems([], ["c"]), "c"),
        (Problems(DIGITS), "; ".join(DIGITS)),
        (Problems(DIGITS[:9], ["x", "y", "z"]), "0; 1; 2; 3; 4; 5; 6; 7; 8; x; and 2 more"),
    ],
)
def test_ten_problems_are_one_error_and_the_others_counted(problems: Problems, error: str) -> None:
    Problems().raise_any("prefix")
    with pytest.raises(InvalidRequestError) as caught:
        problems.raise_any("Wrong: ")
    assert str(caught.value) == f"Wrong: {error}"
    assert isinstance(caught.value, UnsupportedParameterError) is (not problems.invalid)


# -- values in messages ------------------------------------------------------------------------------------------------


@by_rows(
    ("value", "shown"),
    [
        *((None, "null"), (True, "true"), (1.5, "1.5"), ("a\n", '"a\\n"'), (["é"], '["é"]'), ({"a": 1}, '{"a":1}')),
        ([[[]] * 3, {"a": None}, "é", 1.5], '[[[],[],[]],{"a":null},"é",1.5]'),
        ("x" * 78, '"' + "x" * 78 + '"'),
        *(("x" * length, '"' + "x" * 79 + "…") for length in (79, 10**7)),
        ([1] * 100, "[" + "1," * 39 + "1…"),
        *(({1, 2}, "{1, 2}"), ("\ud800", "'\\ud800'")),  # what is no JSON
    ],
)
def test_eighty_characters_of_a_value_are_shown_as_json(value: object, shown: str) -> None:
    assert show(value) == shown


# -- describing --------------------------------------------------------------------------------------------------------


def test_a_table_describes_objects_with_its_names() -> None:
    schema = TABLE.schema()
    assert (schema["type"], "additionalProperties" in schema, "required" in schema) == ("object", False, False)
    assert list(schema["properties"]) == list(TABLE.rows)
    assert schema["properties"]["top_k"] == {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "null"}]}
    assert schema["properties"]["k"]["description"] == "The same as top_k."
    assert schema["properties"]["model"] == {"description": "Accepted, without effect."}


def test_what_is_refused_may_have_the_values_that_change_nothing() -> None:
    properties = TABLE.schema()["properties"]
    assert properties["tool_choice"]["enum"] == ["none", 0, None]
    assert properties["tool_choice"]["description"] == "Accepted for compatibility. there are no tools"
    assert properties["watermark"]["enum"] == [False, 0, None]
    assert properties["cached"]["enum"] == [None]
    both = Table((Parameter(("both",), neutral=(0, False, True)),)).schema()
    assert both["properties"]["both"]["enum"] == [0, False, True, 1, None]


def test_a_required_value_is_not_null() -> None:
    table = Table((Parameter(("prompt",), PROMPT, "prompt"), Parameter(("any",), Kind("any", str), "any")))
    assert table.schema()["properties"]["any"] == {}
    table = Table((Parameter(("prompt",), PROMPT, "prompt"),), required=("prompt",))
    assert table.schema()["required"] == ["prompt"]
    assert table.schema()["properties"]["prompt"] == {"type": "string", "minLength": 1}
    assert table.kind.schema == table.schema()
    assert table.kind.read({}) == {}


def test_a_body_is_an_object() -> None:
    assert read_object(RawRequest(b'{"a": 1}', {})) == {"a": 1}
    with pytest.raises(InvalidRequestError, match=r"^the body is 3: expected a JSON object$"):
        read_object(RawRequest(b"3", {}))
    with pytest.raises(InvalidRequestError, match=r"expected a JSON object with 'prompt'$"):
        read_object(RawRequest(b"[]", {}), "prompt")


@pytest.mark.parametrize(("payload", "shown"), [({}, "missing"), ({"prompt": ""}, '""'), ({"prompt": "a"}, None)])
def test_a_text_is_there_and_not_empty(payload: dict[str, Any], shown: str | None) -> None:
    problems = Problems()
    check_text(payload, "prompt", problems)
    expected = [] if shown is None else [f"'prompt' is {shown}: expected a text that is not empty"]
    assert problems.invalid == expected


def test_a_text_that_is_wrong_otherwise_is_refused_once() -> None:
    problems = Problems()
    problems.invalid.append("'prompt' is 3: expected a text")
    check_text({}, "prompt", problems)
    assert len(problems.invalid) == 1


BOUNDS_TABLE = Table((Parameter(("top_k", "top_p"), STRINGS, "top"),))


@pytest.mark.parametrize("kind", [STRINGS, STRINGS_OR_NONE])
def test_a_word_has_a_bounded_length(kind: Kind) -> None:
    assert kind.read(["a" * LONGEST_STRING]) == ("a" * LONGEST_STRING,)
    with pytest.raises(ValueError, match=f"one has {LONGEST_STRING + 1} characters, at most {LONGEST_STRING}"):
        kind.read(["b", "a" * (LONGEST_STRING + 1)])


def test_of_many_unknown_names_only_those_that_are_shown_get_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(name: str, *others: object) -> list[str]:
        looked.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", look)
    problems = Problems()
    BOUNDS_TABLE.read({f"top{number}": 1 for number in range(1000)}, problems, "field")
    assert (len(problems.invalid), len(looked)) == (1000, 10)
    problems = Problems()
    BOUNDS_TABLE.read({f"top{number}": 1 for number in range(20_000)}, problems, "field")
    assert problems.invalid == ["there are 20000 names of the kind field: expected at most 1024"]
    assert len(looked) == 10


def test_of_a_large_value_only_what_is_shown_is_written() -> None:
    class Counted(list[int]):
        seen = 0

        def __iter__(self) -> Iterator[int]:
            for item in super().__iter__():
                self.seen += 1
                yield item

    large = Counted(range(100_000))
    assert show({"a": large}) == f'{{"a":{[*range(40)]}'.replace(" ", "")[:80] + "…"
    assert large.seen < 80


WARN = Options(unknown_parameters=UnknownParameters.WARN)
UNKNOWN_TABLE = Table((Parameter(("model",), target=IGNORED),), elsewhere={"stream": "beside 'parameters'"})


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameters, "_logged", set())


def warning(*names: str) -> str:
    problems = Problems.of(WARN)
    assert UNKNOWN_TABLE.read(dict.fromkeys(names, 1), problems, "field") == {}
    problems.raise_any()
    ((header, value),) = problems.headers
    assert header == "Warning"
    value.encode("ascii")
    start, end = '299 djl-trtllm "unknown and ignored: ', ' (option.unknown_parameters=warn)"'
    assert value.startswith(start) and value.endswith(end)
    return value.removeprefix(start).removesuffix(end)


@pytest.mark.usefixtures("clean_imports")
@pytest.mark.parametrize("annotation", ["RequestOutput", "dict"])
def test_a_models_own_formatters_keep_the_header(annotation: str, tmp_path: Path) -> None:
    source = f"""
        from djl_python.output_formatter import output_formatter

        @output_formatter
        def write(output: "{annotation}"):
            return "x"
    """
    request = RawRequest(b'{"inputs": "a wolf", "tempratur": 1}', {})
    assert "tempratur" in load(tmp_path, source).parse(request, PlayedModel(WARN)).headers[0][1]


def test_names_are_written_so_that_a_header_can_have_them() -> None:
    assert warning("a", "b") == "a, b"
    assert warning('é"\r\n\\') == r"\xe9\"\r\n\\"
    assert warning("x" * 1000) == "x" * 80
    assert warning(*map(str, range(12))) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more"


def test_the_log_has_each_name_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warning("a", "b")
        warning("b")
    assert [record.getMessage() for record in caplog.records] == [
        'unknown field "a" in requests: ignored (option.unknown_parameters=warn)',
        'unknown field "b" in requests: ignored (option.unknown_parameters=warn)',
    ]


def test_the_log_has_not_very_many_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warning(*map(str, range(1010)))
    assert len(caplog.records) == 1000


def test_a_field_in_the_wrong_place_is_refused_either_way() -> None:
    problems = Problems.of(WARN)
    UNKNOWN_TABLE.read({"stream": True}, problems, "parameter")
    assert problems.invalid == ["'stream' belongs beside 'parameters'"] and problems.headers == ()


def test_no_sampling_parameter_is_also_one_that_is_not_supported() -> None:
    assert {name for row in SAMPLING for name in row.names} & UNSUPPORTED.keys() == set()
