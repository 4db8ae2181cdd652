from __future__ import annotations

import pytest
from hypothesis import given

from djl_trtllm.api.output_parsers.llama3_json import Llama3JsonParser
from tests.api.output_parsers.answers import Answer, check_cuts, cut_texts, parse

CALL = '{"name": "f", "parameters": {"a": "b"}}'
F = ("f", '{"a": "b"}')


def parser() -> Llama3JsonParser:
    return Llama3JsonParser({"f"})


@given(cut_texts())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(parser, pieces)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The wolf ran.", Answer("The wolf ran.")),
        (CALL, Answer("", (F,))),
        (f"\n\n<|python_tag|>{CALL}", Answer("", (F,))),
        (f"{CALL}; {CALL}\n{CALL}", Answer("", (F, F, F))),
        (f"I look.\n<|python_tag|>{CALL}", Answer("I look.", (F,))),
        (f"{CALL}; then", Answer(";then", (F,))),
        (f"{CALL};X", Answer(";X", (F,))),
        (" " * 256 + CALL, Answer("", (F,))),
        (f"<|python_tag|>{CALL.replace('f', 'g', 1)}", Answer("", (("g", '{"a": "b"}'),))),
    ],
)
def test_calls_are_found_in_the_text(text: str, answer: Answer) -> None:
    assert parse(parser(), text) == parse(parser(), *text) == answer


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Little Red", "parameters": {}}',
        '{"story": "wolf"}',
        f"See {CALL}",
        " " * 257 + CALL,
        '<|python_tag|>brave_search.call(query="wolf")',
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(parser(), text) == parse(parser(), *text) == Answer(text)
