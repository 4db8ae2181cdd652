from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api.output_parsers import Content, Reasoning, ReasoningParser
from djl_trtllm.api.output_parsers.base import PlainParser
from djl_trtllm.api.output_parsers.hermes import HermesParser
from tests.api.output_parsers.answers import Answer, check_cuts, cut_texts, parse


def plain(thinking: bool = False) -> ReasoningParser:
    return ReasoningParser(PlainParser(), thinking=thinking)


@given(cut_texts(), st.booleans())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str], thinking: bool) -> None:
    check_cuts(lambda: plain(thinking), pieces)
    check_cuts(lambda: ReasoningParser(HermesParser(), thinking=thinking), pieces)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", Answer("Yes.", reasoning="Hm.")),
        ("\n<think></think> Yes.", Answer("Yes.")),
        ("Yes. <think>Hm.</think>", Answer("Yes. <think>Hm.</think>")),
        ("<think>Hm. </thin", Answer(reasoning="Hm. </thin")),
        ("<think> Hm <b> \n", Answer(reasoning="Hm <b> \n")),
        ("<thi", Answer("<thi")),
        (" <thing> ", Answer(" <thing> ")),
        ("", Answer()),
        ("<think>", Answer()),
        ("<think>a</think>b</think>", Answer("b</think>", reasoning="a")),
    ],
)
def test_reasoning_stands_between_its_tags(text: str, answer: Answer) -> None:
    assert parse(plain(), text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Hm.\n</think>\n\nYes.", Answer("Yes.", reasoning="Hm.")),
        ("<think>Hm.</think>Yes.", Answer("Yes.", reasoning="Hm.")),
        ("Hm.", Answer(reasoning="Hm.")),
        ("<thi", Answer(reasoning="<thi")),
    ],
)
def test_an_output_that_begins_with_reasoning_needs_no_tag(text: str, answer: Answer) -> None:
    assert parse(plain(True), text) == answer


def test_calls_are_found_after_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = ReasoningParser(HermesParser(), thinking=False)
    assert parse(parser, f"<think>{call}</think>\n{call}") == Answer("", (("f", "{}"),), call)


def test_reasoning_is_streamed() -> None:
    parser = plain()
    assert parser.feed("<think>") == []
    assert parser.feed("\nThe wolf ") == [Reasoning("The wolf")]
    assert parser.feed("ran") == [Reasoning(" ran")]
    assert parser.feed("</think>") == []
    assert parser.feed("\n\nYes") == [Content("Yes")]
