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
from tests.support.tables import by_rows, by_table

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


def read(**given: Any) -> tuple[dict[str, Any], Problems]:
    problems = Problems()
    return TABLE.read(given, problems, "parameter"), problems


def values(**given: Any) -> dict[str, Any]:
    found, problems = read(**given)
    assert problems == Problems()
    return found


def invalid(**given: Any) -> list[str]:
    _, problems = read(**given)
    assert problems.unsupported == []
    return problems.invalid


def unsupported(**given: Any) -> list[str]:
    _, problems = read(**given)
    assert problems.invalid == []
    return problems.unsupported


# -- kinds -------------------------------------------------------------------------------------------------------------

SIXTY_FOUR = [str(i) for i in range(64)]


@by_rows(
    ("kind", "given", "value"),
    [
        (integer(1), 1, 1),
        (integer(1), 2**70, 2**70),
        (integer(0, 3), 0, 0),
        (integer(0, 3), 3, 3),
        (number(0), 0, 0.0),
        (number(0), 0.0, 0.0),
        (number(-2, 2), -2, -2.0),
        (number(-2, 2), 2.0, 2.0),
        (number(0, 1, above=True), 1, 1.0),
        (number(0, above=True), 1e308, 1e308),
        (BOOLEAN, True, True),
        (BOOLEAN, False, False),
        (TEXT, "", ""),
        (STRINGS, "a", ("a",)),
        (STRINGS, [], ()),
        (STRINGS, ["a", "b", "a"], ("a", "b")),
        (STRINGS, SIXTY_FOUR, tuple(SIXTY_FOUR)),
        (STRINGS_OR_NONE, "", ()),
        (STRINGS_OR_NONE, [], ()),
        (STRINGS_OR_NONE, ["a"], ("a",)),
        (TOKEN_IDS, [3, 0, 2**31 - 1, 3], (3, 0, 2**31 - 1)),
        (TOKEN_IDS, list(range(1024)), tuple(range(1024))),
        (TOKEN_IDS, [], ()),
        (OBJECT, {"a": 1}, {"a": 1}),
    ],
)
def test_a_kind_takes_its_values(kind: Kind, given: object, value: object) -> None:
    found = kind.read(given)
    assert found == value and type(found) is type(value)


NO_HINT = [
    (integer(1, 3), 0),
    (integer(1, 3), 4),
    (integer(1), True),
    (integer(1), 1.5),
    (integer(1), 2.0**53),
    (integer(1), float("inf")),
    (integer(1), float("nan")),
    (integer(1), [1]),
    (integer(1), "one"),
    (number(0, 1), -0.001),
    (number(0, 1), 1.001),
    (number(0, 1, above=True), 0),
    (number(0, above=True), 0.0),
    (number(0), float("inf")),
    (number(-1), float("-inf")),
    (number(0), float("nan")),
    (number(0, 1), True),
    (number(0, 1), [0]),
    (BOOLEAN, 1),
    (BOOLEAN, "maybe"),
    (BOOLEAN, '"'),
    (BOOLEAN, "[1]"),
    (TEXT, 3),
    (STRINGS, ""),
    (STRINGS, [""]),
    (STRINGS, [1]),
    (STRINGS, {"a": 1}),
    (STRINGS, [*SIXTY_FOUR, "x"]),
    (STRINGS_OR_NONE, [""]),
    (STRINGS_OR_NONE, 0),
    (TOKEN_IDS, 3),
    (TOKEN_IDS, [-1]),
    (TOKEN_IDS, [2**31]),
    (TOKEN_IDS, [True]),
    (TOKEN_IDS, [1.0]),
    (TOKEN_IDS, ["1"]),
    (TOKEN_IDS, list(range(1025))),
    (OBJECT, []),
]


@by_rows(("kind", "given"), NO_HINT)
def test_a_kind_refuses_other_values(kind: Kind, given: object) -> None:
    with pytest.raises(ValueError) as caught:
        kind.read(given)
    assert str(caught.value) == ""


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
            "a string or a list of up to 64 strings",
            {"anyOf": [TEXT.schema, {"type": "array", "items": WORD, "maxItems": 64}]},
        ),
    ],
)
def test_a_kind_says_what_it_expects(kind: Kind, expected: str, schema: object) -> None:
    assert (kind.expected, kind.schema) == (expected, schema)


# -- tables ------------------------------------------------------------------------------------------------------------


def test_values_are_read_by_target_under_any_name() -> None:
    assert values(top_k=3) == values(k=3) == {"top_k": 3}
    assert values() == values(top_k=None, watermark=None, nonsense=None) == {}


def test_an_ignored_parameter_may_have_any_value() -> None:
    assert values(model=[1, 2]) == {}


def test_two_names_of_one_parameter_must_agree() -> None:
    assert values(top_k=3, k=3) == {"top_k": 3}
    assert invalid(top_k=3, k=4) == ["'k' and 'top_k' mean the same and have different values: give one"]
    assert invalid(k=4, top_k=3) == ["'top_k' and 'k' mean the same and have different values: give one"]


def test_lists_under_two_names_are_joined() -> None:
    assert values(stop=["a", "b"], stop_sequences=["b", "c"]) == {"stop": ("a", "b", "c")}


def test_a_wrong_value_is_reported_with_what_is_expected_and_the_others_are_read() -> None:
    found, problems = read(k=-1, stop="a")
    assert problems.invalid == ["'k' is -1: expected an integer of at least 0"]
    assert found == {"stop": ("a",)}
    assert invalid(k=5.0) == ["'k' is 5.0: expected an integer of at least 0 (written without a decimal point: 5)"]


@pytest.mark.parametrize(("name", "value"), [("watermark", False), ("tool_choice", "none"), ("tool_choice", 0)])
def test_a_parameter_that_cannot_be_honoured_is_taken_where_it_changes_nothing(name: str, value: object) -> None:
    assert values(**{name: value}) == {}


@by_table("name", "value", "told")
def test_it_is_refused_by_name_where_it_would_change_something(name: str, value: object, told: str) -> None:
    assert unsupported(**{name: value}) == [told]


def test_an_equal_number_of_another_type_is_neutral_too() -> None:
    assert values(tool_choice=0.0) == {}


def test_an_unknown_name_is_reported_with_the_nearest_one() -> None:
    assert invalid(top_q=1) == ["unknown parameter \"top_q\", did you mean 'top_k'?"]
    assert invalid(qqqq=1) == ['unknown parameter "qqqq"']
    assert invalid(stream=True) == ["'stream' belongs beside 'parameters'"]
    (told,) = invalid(**{"b" * 100_000: 1})
    assert len(told) < 120


def test_a_table_without_names_of_other_places_knows_none() -> None:
    problems = Problems()
    assert Table((Parameter(("a",), TEXT, "a"),)).read({"stream": 1}, problems, "field") == {}
    assert problems.invalid == ['unknown field "stream"']


# -- problems ----------------------------------------------------------------------------------------------------------


def test_no_problems_raise_nothing() -> None:
    Problems().raise_any("prefix")


def test_all_problems_are_one_error() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Problems(["a", "b"], ["c"]).raise_any("Wrong: ")
    assert str(caught.value) == "Wrong: a; b; c"
    assert type(caught.value) is InvalidRequestError


def test_an_error_is_of_what_is_not_supported_where_nothing_is_wrong() -> None:
    with pytest.raises(UnsupportedParameterError) as caught:
        Problems([], ["c"]).raise_any()
    assert str(caught.value) == "c"


def test_ten_problems_are_reported_and_the_others_counted() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Problems([str(i) for i in range(10)]).raise_any()
    assert str(caught.value) == "0; 1; 2; 3; 4; 5; 6; 7; 8; 9"
    with pytest.raises(InvalidRequestError) as caught:
        Problems([str(i) for i in range(9)], ["x", "y", "z"]).raise_any()
    assert str(caught.value) == "0; 1; 2; 3; 4; 5; 6; 7; 8; x; and 2 more"


# -- values in messages ------------------------------------------------------------------------------------------------


def test_a_value_is_shown_as_json() -> None:
    assert [show(value) for value in (None, True, 1.5, "a\n", ["é"], {"a": 1})] == [
        "null",
        "true",
        "1.5",
        '"a\\n"',
        '["é"]',
        '{"a":1}',
    ]


def test_eighty_characters_of_a_value_are_shown() -> None:
    assert show("x" * 78) == '"' + "x" * 78 + '"'
    assert show("x" * 79) == '"' + "x" * 79 + "…"
    assert show("x" * 10**7) == '"' + "x" * 79 + "…"
    assert show([1] * 100) == "[" + "1," * 39 + "1…"


def test_what_is_no_json_is_shown_as_python_has_it() -> None:
    assert show({1, 2}) == "{1, 2}"
    assert show("\ud800") == "'\\ud800'"


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
    assert show([[[]] * 3, {"a": None}, "é", 1.5]) == '[[[],[],[]],{"a":null},"é",1.5]'


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
