from __future__ import annotations

import pytest

from djl_trtllm.api.output_parsers import Content
from djl_trtllm.api.output_parsers.base import MOST_BLANKS, PlainParser, blanks_start, safe_end
from djl_trtllm.api.output_parsers.hermes import HermesParser
from djl_trtllm.api.output_parsers.mistral import MistralParser
from tests.api.output_parsers.answers import Answer, parse


def test_a_plain_parser_passes_everything_on() -> None:
    assert parse(PlainParser(), "a", "", "<tool_call>") == Answer("a<tool_call>")


@pytest.mark.parametrize(
    ("text", "end"),
    [("abc", 3), ("abc <", 3), ("abc \n", 3), ("a<to<", 4), ("a<to", 1), ("", 0), ("<", 0), ("a" + " " * 300, 45)],
)
def test_what_may_belong_to_a_marker_is_held(text: str, end: int) -> None:
    assert safe_end(text, "<tool>") == end


def test_a_bounded_number_of_blanks_is_held() -> None:
    assert blanks_start("a" + " " * MOST_BLANKS) == 1
    assert blanks_start("a" + " " * (MOST_BLANKS + 1)) == 2
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(HermesParser(), " " * (MOST_BLANKS + 2) + call) == Answer("  ", (("f", "{}"),))


def test_content_is_not_held_longer_than_it_must_be() -> None:
    parser = HermesParser()
    assert parser.feed("The wolf ") == [Content("The wolf")]
    assert parser.feed("<b") == [Content(" <b")]
    assert parser.feed(" <tool") == []
    assert parser.feed("s>") == [Content(" <tools>")]
    assert parser.feed(" ") == []
    assert parser.finish() == [Content(" ")]


@pytest.mark.parametrize("text", ["a <tool_call>b</tool_call> c", "a \n<tool_call>[1] c", "a <tool_call>{", "a <tool_"])
def test_what_turns_out_to_be_no_call_is_content(text: str) -> None:
    assert parse(HermesParser(), text) == parse(HermesParser(), *text) == Answer(text)


def test_blanks_around_calls_are_markup() -> None:
    call = '<tool_call> {"name": "f"} </tool_call>'
    assert parse(HermesParser(), f"a {call} \n {call} b") == Answer("ab", (("f", "{}"), ("f", "{}")))


def test_blanks_before_what_is_no_call_are_content() -> None:
    text = "a [TOOL_CALLS] \n[1]"
    assert parse(MistralParser(), text) == parse(MistralParser(), *text) == Answer(text)
