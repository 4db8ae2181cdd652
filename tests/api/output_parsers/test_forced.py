from __future__ import annotations

from hypothesis import given

from djl_trtllm.api.output_parsers import CallArguments, CallStart
from djl_trtllm.api.output_parsers.forced import NamedParser, RequiredParser
from tests.api.output_parsers.answers import Answer, check_cuts, cut_texts, parse


@given(cut_texts())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str]) -> None:
    check_cuts(RequiredParser, pieces)
    check_cuts(lambda: NamedParser("f"), pieces)


def test_required_calls_are_a_list() -> None:
    text = '\n[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert parse(RequiredParser(), text) == Answer("", (("f", '{"a": 1}'), ("g", "{}")))
    assert parse(RequiredParser(), "no list") == Answer("no list")
    later = 'no list [TOOL_CALLS][{"name": "f"}]'
    assert parse(RequiredParser(), later) == parse(RequiredParser(), *later) == Answer("no list", (("f", "{}"),))


def test_the_output_of_a_named_call_is_its_arguments() -> None:
    parser = NamedParser("f")
    assert parser.feed("") == []
    assert parser.feed('{"a') == [CallStart("f"), CallArguments('{"a')]
    assert parser.feed('":1}') == [CallArguments('":1}')]
    assert parser.finish() == []
