from __future__ import annotations

import pytest
from hypothesis import given

from djl_trtllm.api.output_parsers import CallArguments, CallStart
from djl_trtllm.api.output_parsers.hermes import HermesParser
from tests.api.output_parsers.answers import Answer, check_cuts, cut_texts, parse

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", '{"city": "Rome"}')


@given(cut_texts())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(HermesParser, pieces)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("The wolf <b>ran</b>. ", Answer("The wolf <b>ran</b>. ")),
        (CALL, Answer("", (ROME,))),
        (f"Let me see.\n\n{CALL}\n", Answer("Let me see.", (ROME,))),
        (f"{CALL}\n{CALL}", Answer("", (ROME, ROME))),
        (f"{CALL}\nDone.", Answer("Done.", (ROME,))),
        (CALL.removesuffix("</tool_call>"), Answer("", (ROME,))),
        (CALL.removesuffix("</tool_call>") + "Done.", Answer("Done.", (ROME,))),
        (CALL.removesuffix("}\n</tool_call>"), Answer("", (ROME,))),
        (CALL.replace('"}}', '"'), Answer("", (("weather", '{"city": "Rome"\n'),))),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', Answer("", (("f", '{"a": 1}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', Answer("", (("f", '{"a": 1}'),))),
        ('<tool_call>{"name": "f"}</tool_call>', Answer("", (("f", "{}"),))),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', Answer("", (("f", '{"a": 1}'),))),
        ('<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>',
         Answer("", (("f", '{"a": "</tool_call>"}'),))),
    ],
)  # fmt: skip
def test_calls_are_found_in_the_text(text: str, answer: Answer) -> None:
    assert parse(HermesParser(), text) == parse(HermesParser(), *text) == answer


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>hello</tool_call>",
        "<tool_call></tool_call>",
        'x <tool_call>{"name": "f", "arguments": [1]}</tool_call> y',
        'x <tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"name": ""}</tool_call>',
        '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
        '<tool_call>{"function": "f"}</tool_call>',
        "a <tool_call> {",
        'a <tool_call> {"name": "f", "arg',
        "a <tool_c",
        "</tool_call>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(HermesParser(), text) == parse(HermesParser(), *text) == Answer(text)


def test_a_call_is_streamed_its_name_first() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a"') == [CallStart("f"), CallArguments('{"a"')]
    assert parser.feed(': "b') == [CallArguments(': "b')]
    assert parser.feed('"}') == [CallArguments('"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []
