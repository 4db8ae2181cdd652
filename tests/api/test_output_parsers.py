"""What a parser finds in a text, and texts that look like calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from djl_trtllm.api.output_parsers import _MISTRAL_MARKERS as MARKERS
from djl_trtllm.api.output_parsers import (
    MOST_BLANKS,
    CallArguments,
    CallStart,
    Content,
    HermesParser,
    Llama3JsonParser,
    MistralParser,
    NamedParser,
    OutputParser,
    PlainParser,
    Reasoning,
    ReasoningParser,
    RequiredParser,
    ValueEnd,
    blanks_start,
    closes_reasoning,
    opens_reasoning,
    reasoning_format,
    safe_end,
    tool_format,
)
from djl_trtllm.config import ReasoningFormat, ToolCallFormat
from tests.support.tables import by_table

MakeParser = Callable[[], OutputParser]


class Answer(NamedTuple):
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""

    @classmethod
    def of(cls, content: str, calls: list[list[str]], reasoning: str) -> Answer:
        """An answer of a table."""
        return cls(content, tuple((name, arguments) for name, arguments in calls), reasoning)


def parse(parser: OutputParser, *pieces: str) -> Answer:
    content = reasoning = ""
    calls: list[list[str]] = []
    for event in [event for piece in pieces for event in parser.feed(piece)] + parser.finish():
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallStart(name):
                calls.append([name, ""])
            case CallArguments(text):
                calls[-1][1] += text
        assert not isinstance(event, (Content, Reasoning)) or event.text
    return Answer.of(content, calls, reasoning)


_PARTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "f", "arguments": {"a": "b"}}', '{"name":"f","parameters":{}}', '{"name": "f"}', '"\\ud800"'),
    *('{"arguments": "{}", "name": "f"}', '{"name": "f", "arguments": {', '{"name": "f", "arguments": null}'),
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ",",
        ":",
        ";",
        "<",
        "name",
        "arguments",
        " ",
        "\n",
        "f",
        "é",
        "x" * 300,
        " " * 300,
    ),
)
TEXTS = st.lists(st.sampled_from(_PARTS), max_size=12).map("".join)
"""Texts of markup, right and wrong."""


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    """A text in pieces."""
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=20)))
    return [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]


def check_cuts(make: MakeParser, pieces: list[str], call: str = "") -> None:
    """However a text is cut, the answer is the same, and without calls it is the text.

    Text that begins as a `call` may be one whose end is missing, and is no content then.
    """
    text = "".join(pieces)
    whole = parse(make(), text)
    assert parse(make(), *pieces) == whole
    assert parse(make(), *text) == whole
    if not whole.calls and not whole.reasoning and "think>" not in text:
        begun = bool(call) and text.lstrip().startswith(call)
        assert whole.content == text or not text.strip() or (begun and not whole.content)


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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES, st.sampled_from([",", "}", " ", "]"]), st.integers(1, 5))
def test_the_end_of_a_value_is_found(value: Any, after: str, size: int) -> None:
    raw = json.dumps(value)
    end, text = ValueEnd(raw[0]), raw + after
    for start in range(0, len(text), size):
        found = end.find(text[start : start + size])
        if found is not None:
            assert (start + found, end.broken) == (len(raw), False)
            return
    raise AssertionError(text)


def hermes(text: str) -> Answer:
    return parse(HermesParser(), *f"<tool_call>{text}")


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.text(min_size=1, max_size=5))
def test_arguments_are_passed_on_as_they_are(arguments: dict[str, Any], name: str) -> None:
    raw = json.dumps(arguments)
    for text in (
        f'{{"name": {json.dumps(name)}, "arguments": {raw}}}rest',
        f'{{ "parameters" : {raw} ,"name":{json.dumps(name)} }}rest',
    ):
        assert hermes(text) == Answer("rest", ((name, raw),))


@by_table("text", "seen")
def test_what_cannot_be_a_call_is_content_as_soon_as_that_is_seen(text: str, seen: int) -> None:
    parser = Llama3JsonParser({"f"})
    assert all(not parser.feed(char) for char in text[: seen - 1])
    shown = "".join(event.text for event in parser.feed(text[seen - 1]) if isinstance(event, Content))
    # What might be the beginning of a marker, or blanks before one, is held longer.
    assert text[:seen].removesuffix("<") == shown.removesuffix("<") and text.startswith(shown)


def test_a_call_that_has_started_cannot_fail() -> None:
    text = '{"name": "f", "arguments": {"a": 1}'
    assert hermes(text + " wolf") == Answer("wolf", (("f", '{"a": 1}'),))
    assert hermes('{"name": "f", "arguments": {"a": <b>') == Answer("<b>", (("f", '{"a": '),))
    for more in (', "name": 3, "arguments": {"b": 2}, "id": 4}', ', "parameters": 3}'):
        assert hermes(text + more) == Answer("", (("f", '{"a": 1}'),))


def test_deep_arguments_are_no_error() -> None:
    text = '<tool_call>{"arguments": ' + "[" * 100_000 + "]" * 100_000 + ', "name": "f"}'
    assert parse(HermesParser(), text) == Answer(text)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", '{"city": "Rome"}')


@given(cut_texts())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(HermesParser, pieces)


@by_table("text", "answer")
def test_calls_are_found_in_the_text(text: str, answer: list[Any]) -> None:
    assert parse(HermesParser(), text) == parse(HermesParser(), *text) == Answer.of(*answer)


@by_table("text")
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(HermesParser(), text) == parse(HermesParser(), *text) == Answer(text)


def test_a_call_is_streamed_its_name_first() -> None:
    parser = HermesParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a"') == [CallStart("f"), CallArguments('{"a"')]
    assert parser.feed(': "b') == [CallArguments(': "b')]
    assert parser.feed('"}') == [CallArguments('"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


F = ("f", '{"a": "b"}')


def parser() -> Llama3JsonParser:
    return Llama3JsonParser({"f"})


@given(cut_texts())
def test_how_llamas_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(parser, pieces)


@by_table("text", "answer")
def test_llamas_calls_are_found_in_the_text(text: str, answer: list[Any]) -> None:
    assert parse(parser(), text) == parse(parser(), *text) == Answer.of(*answer)


@by_table("text")
def test_what_is_no_call_of_llama_is_content(text: str) -> None:
    assert parse(parser(), text) == parse(parser(), *text) == Answer(text)


@given(cut_texts())
def test_how_mistrals_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(MistralParser, pieces)


@by_table("text", "answer")
def test_mistrals_calls_are_found_in_the_text(text: str, answer: list[Any]) -> None:
    assert parse(MistralParser(), text) == parse(MistralParser(), *text) == Answer.of(*answer)


@by_table("text")
def test_what_is_no_call_of_mistral_is_content(text: str) -> None:
    assert parse(MistralParser(), text) == parse(MistralParser(), *text) == Answer(text)


def test_the_markers_are_tokens_that_the_model_must_be_seen_to_write() -> None:
    assert MARKERS == ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")


@given(cut_texts())
def test_how_a_forced_call_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(RequiredParser, pieces, "[")
    check_cuts(lambda: NamedParser("f"), pieces)


def test_required_calls_are_a_list() -> None:
    text = '\n[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert parse(RequiredParser(), text) == Answer("", (("f", '{"a": 1}'), ("g", "{}")))
    assert parse(RequiredParser(), "no list") == Answer("no list")
    later = 'no list [TOOL_CALLS][{"name": "f"}]'
    assert parse(RequiredParser(), later) == parse(RequiredParser(), *later) == Answer("no list", (("f", "{}"),))


def test_a_required_call_that_is_cut_off_is_no_content() -> None:
    text = '\n[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]'
    first, second = text.index('{"a"'), text.index('{"b"')
    for cut in range(2, len(text)):
        calls = (("f", text[first:cut][:8]), ("g", text[second:cut][:8]))[: (cut > first) + (cut > second)]
        assert parse(RequiredParser(), text[:cut]) == parse(RequiredParser(), *text[:cut]) == Answer("", calls), text[
            :cut
        ]


def test_the_output_of_a_named_call_is_its_arguments() -> None:
    parser = NamedParser("f")
    assert parser.feed("") == []
    assert parser.feed('{"a') == [CallStart("f"), CallArguments('{"a')]
    assert parser.feed('":1}') == [CallArguments('":1}')]
    assert parser.finish() == []


def plain(thinking: bool = False) -> ReasoningParser:
    return ReasoningParser(PlainParser(), thinking=thinking)


@given(cut_texts(), st.booleans())
def test_how_reasoning_is_cut_changes_nothing(pieces: list[str], thinking: bool) -> None:
    check_cuts(lambda: plain(thinking), pieces)
    check_cuts(lambda: ReasoningParser(HermesParser(), thinking=thinking), pieces)


@by_table("text", "answer")
def test_reasoning_stands_between_its_tags(text: str, answer: list[Any]) -> None:
    assert parse(plain(), text) == Answer.of(*answer)


@by_table("text", "answer")
def test_an_output_that_begins_with_reasoning_needs_no_tag(text: str, answer: list[Any]) -> None:
    assert parse(plain(True), text) == Answer.of(*answer)


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


QWEN = "{%- if tools %}<tool_call>\n{\"name\": <function-name>}{% endif %}{{ content.split('</think>') }}"
LLAMA_31 = "{{- '<|python_tag|>' + tool_call.name }}"
LLAMA_32 = """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name'}}"""
MISTRAL = '{{- "[TOOL_CALLS] [" }}'


@pytest.mark.parametrize(
    ("template", "parser"),
    [(QWEN, HermesParser), (LLAMA_31, Llama3JsonParser), (LLAMA_32, Llama3JsonParser), (MISTRAL, MistralParser)],
)
def test_the_template_tells_how_calls_are_written(template: str, parser: type) -> None:
    recognised = tool_format(ToolCallFormat.AUTO, template)
    assert recognised is not None
    assert isinstance(recognised.parser({"f"}), parser)


@pytest.mark.parametrize("template", ["", "{{ tools }}", "<tool_call><function=f>", "<tool_call>f<arg_key>"])
def test_other_formats_are_not_taken_for_a_known_one(template: str) -> None:
    assert tool_format(ToolCallFormat.AUTO, template) is None


def test_the_option_comes_before_the_template() -> None:
    chosen = tool_format(ToolCallFormat.HERMES, MISTRAL)
    assert chosen is not None and isinstance(chosen.parser(set()), HermesParser)
    assert "<tool_call>" in chosen.markers
    nothing = tool_format(ToolCallFormat.NONE, MISTRAL)
    assert nothing is not None and nothing.markers == () and nothing.parser(set()).feed("[TOOL_CALLS]")
    assert reasoning_format(ReasoningFormat.NONE, QWEN) is ReasoningFormat.NONE
    assert reasoning_format(ReasoningFormat.AUTO, QWEN) is ReasoningFormat.QWEN3
    assert reasoning_format(ReasoningFormat.AUTO, MISTRAL) is ReasoningFormat.NONE


def test_ids_are_as_the_template_takes_them() -> None:
    hermes, mistral = (tool_format(ToolCallFormat(name), "") for name in ("hermes", "mistral"))
    assert hermes is not None and mistral is not None
    assert hermes.new_id().startswith("call_") and hermes.new_id() != hermes.new_id()
    assert len(mistral.new_id()) == 9 and mistral.new_id().isalnum()
    assert (hermes.fit_id("call_0123456789"), mistral.fit_id("call_0123456789")) == ("call_0123456789", "123456789")


def test_the_prompt_tells_whether_the_output_begins_with_reasoning() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n") and not opens_reasoning("<think> a")
    assert closes_reasoning("<think>\n\n</think>\n\n") and not closes_reasoning("<think>\n")
