"""What a parser finds in a text, and texts that look like calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from djl_trtllm.api.output_parsers import (
    REQUIRED,
    CallArguments,
    CallStart,
    Content,
    NamedParser,
    OutputParser,
    PlainParser,
    Reasoning,
    call_parser,
    reasoning_format,
    reasoning_markers,
    tool_format,
    with_reasoning,
)
from djl_trtllm.api.output_parsers.formats import REASONING, TOOLS
from djl_trtllm.api.output_parsers.reader import MOST_BLANKS, Markers, ValueEnd, member_of, types_in
from djl_trtllm.config.options import OPTIONS
from djl_trtllm.model.chat_template import ChatTemplate
from tests.api.models import seconds
from tests.support.dialogues import CASES, FUNCTIONS, WRITERS, Answer, parse, parser, write
from tests.support.tables import by_rows, by_table

MakeParser = Callable[[], OutputParser]
hermes = partial(parser, "hermes")
llama = partial(parser, "llama3_json", {"f": None})
mistral = partial(parser, "mistral")
required = partial(call_parser, REQUIRED, {})
OF_FORMAT: dict[str, MakeParser] = {"hermes": hermes, "llama3_json of f": llama, "mistral": mistral}


_PARTS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<think>", "</think>"),
    *('{"name": "f", "arguments": {"a": "b"}}', '{"name":"f","parameters":{}}', '{"name": "f"}', '"\\ud800"'),
    *('{"arguments": "{}", "name": "f"}', '{"name": "f", "arguments": {', '{"name": "f", "arguments": null}'),
    *'{}[]"\\,:;< \nfé',
    *("name", "arguments", "x" * 300, " " * 300),
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


@by_rows(
    ("text", "begun"),
    [("abc", 3), ("abc <", 4), ("a<to<", 4), ("a<to", 1), ("a<ta", 4), ("", 0), ("<", 0), ("<tool", 0), ("[<", 1)],
)
def test_what_may_belong_to_a_marker_is_held(text: str, begun: int) -> None:
    assert Markers("<tool>", "[end").begun(text, 0) == begun


def test_a_bounded_number_of_blanks_is_held() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    assert parse(hermes(), " " * (MOST_BLANKS + 2) + call) == Answer("  ", (("f", "{}"),))


def test_content_is_not_held_longer_than_it_must_be() -> None:
    parser = hermes()
    assert parser.feed("The wolf ") == [Content("The wolf")]
    assert parser.feed("<b") == [Content(" <b")]
    assert parser.feed(" <tool") == []
    assert parser.feed("s>") == [Content(" <tools>")]
    assert parser.feed(" ") == []
    assert parser.finish() == [Content(" ")]


@pytest.mark.parametrize("text", ["a <tool_call>b</tool_call> c", "a \n<tool_call>[1] c", "a <tool_call>{", "a <tool_"])
def test_what_turns_out_to_be_no_call_is_content(text: str) -> None:
    assert parse(hermes(), text) == parse(hermes(), *text) == Answer(text)


def test_blanks_around_calls_are_markup() -> None:
    call = '<tool_call> {"name": "f"} </tool_call>'
    assert parse(hermes(), f"a {call} \n {call} b") == Answer("ab", (("f", "{}"), ("f", "{}")))


def test_blanks_before_what_is_no_call_are_content() -> None:
    text = "a [TOOL_CALLS] \n[1]"
    assert parse(mistral(), text) == parse(mistral(), *text) == Answer(text)


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
        found = end.find(text[start : start + size], 0)
        if found is not None:
            assert (start + found, end.broken) == (len(raw), False)
            return
    raise AssertionError(text)


def test_a_tag_outside_of_strings_breaks_a_value_off() -> None:
    end = ValueEnd("{")
    assert (end.find('{"a": "<", "b": <x>', 0), end.broken) == (16, True)


def after_tag(text: str) -> Answer:
    return parse(hermes(), *f"<tool_call>{text}")


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=3), st.text(min_size=1, max_size=5))
def test_arguments_are_passed_on_as_they_are(arguments: dict[str, Any], name: str) -> None:
    raw = json.dumps(arguments)
    for text in (
        f'{{"name": {json.dumps(name)}, "arguments": {raw}}}rest',
        f'{{ "parameters" : {raw} ,"name":{json.dumps(name)} }}rest',
    ):
        assert after_tag(text) == Answer("rest", ((name, raw),))


@by_table("text", "seen")
def test_what_cannot_be_a_call_is_content_as_soon_as_that_is_seen(text: str, seen: int) -> None:
    parser = llama()
    assert all(not parser.feed(char) for char in text[: seen - 1])
    shown = "".join(event.text for event in parser.feed(text[seen - 1]) if isinstance(event, Content))
    # What might be the beginning of a marker, or blanks before one, is held longer.
    assert text[:seen].removesuffix("<") == shown.removesuffix("<") and text.startswith(shown)


def test_a_call_that_has_started_cannot_fail() -> None:
    text = '{"name": "f", "arguments": {"a": 1}'
    assert after_tag(text + " wolf") == Answer("wolf", (("f", '{"a": 1}'),))
    assert after_tag('{"name": "f", "arguments": {"a": <b>') == Answer("<b>", (("f", '{"a": '),))
    for more in (', "name": 3, "arguments": {"b": 2}, "id": 4}', ', "parameters": 3}'):
        assert after_tag(text + more) == Answer("", (("f", '{"a": 1}'),))


def test_deep_arguments_are_no_error() -> None:
    text = '<tool_call>{"arguments": ' + "[" * 100_000 + "]" * 100_000 + ', "name": "f"}'
    assert parse(hermes(), text) == Answer(text)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ROME = ("weather", '{"city": "Rome"}')


@given(cut_texts(), st.booleans())
def test_how_a_text_is_cut_changes_nothing(pieces: list[str], thinking: bool) -> None:
    makers: list[MakeParser] = [*OF_FORMAT.values(), partial(NamedParser, "f"), PlainParser]
    for make in makers:
        check_cuts(make, pieces)
    check_cuts(required, pieces, "[")
    check_cuts(partial(plain, thinking), pieces)
    check_cuts(lambda: thinks(hermes(), thinking), pieces)


@by_table("writer", "text", "answer")
def test_calls_are_found_in_the_text_and_other_text_is_content(writer: str, text: str, answer: list[Any]) -> None:
    make = OF_FORMAT.get(writer, partial(parser, writer))
    assert parse(make(), text) == parse(make(), *text) == Answer.of(*answer)


def test_a_call_is_streamed_its_name_first() -> None:
    parser = hermes()
    assert parser.feed('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.feed('{"a"') == [CallStart("f"), CallArguments('{"a"')]
    assert parser.feed(': "b') == [CallArguments(': "b')]
    assert parser.feed('"}') == [CallArguments('"}')]
    assert parser.feed("}</tool_call>") == parser.finish() == []


def test_required_calls_are_a_list() -> None:
    text = '\n[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert parse(required(), text) == Answer("", (("f", '{"a": 1}'), ("g", "{}")))
    assert parse(required(), "no list") == Answer("no list")
    later = 'no list [TOOL_CALLS][{"name": "f"}]'
    assert parse(required(), later) == parse(required(), *later) == Answer("no list", (("f", "{}"),))


def test_a_required_call_that_is_cut_off_is_no_content() -> None:
    text = '\n[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {"b": 2}}]'
    first, second = text.index('{"a"'), text.index('{"b"')
    for cut in range(2, len(text)):
        calls = (("f", text[first:cut][:8]), ("g", text[second:cut][:8]))[: (cut > first) + (cut > second)]
        assert parse(required(), text[:cut]) == parse(required(), *text[:cut]) == Answer("", calls), text[:cut]


def test_the_output_of_a_named_call_is_its_arguments() -> None:
    parser = NamedParser("f")
    assert parser.feed("") == []
    assert parser.feed('{"a') == [CallStart("f"), CallArguments('{"a')]
    assert parser.feed('":1}') == [CallArguments('":1}')]
    assert parser.finish() == []


def thinks(answer: OutputParser, thinking: bool = False, own: str = "qwen3") -> OutputParser:
    return with_reasoning(own, answer, REASONING[own].open if thinking else "")


def plain(thinking: bool = False) -> OutputParser:
    return thinks(PlainParser(), thinking)


def test_calls_are_found_after_the_reasoning_only() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse(thinks(hermes()), f"<think>{call}</think>\n{call}") == Answer("", (("f", "{}"),), call)


def test_reasoning_is_streamed() -> None:
    parser = plain()
    assert parser.feed("<think>") == []
    assert parser.feed("\nThe wolf ") == [Reasoning("The wolf")]
    assert parser.feed("ran") == [Reasoning(" ran")]
    assert parser.feed("</think>") == []
    assert parser.feed("\n\nYes") == [Content("Yes")]


QWEN = "{%- if tools %}<tool_call>\n{\"name\": <function-name>}{% endif %}{{ content.split('</think>') }}"
MISTRAL = '{{- "[TOOL_CALLS] [" }}'


@by_table("template", "name")
def test_the_template_tells_how_calls_are_written(template: str, name: str) -> None:
    assert tool_format("auto", template) is TOOLS[name]


@pytest.mark.parametrize("template", ["", "{{ tools }}", "{{ tools }}<function=f>"])
def test_other_formats_are_not_taken_for_a_known_one(template: str) -> None:
    assert tool_format("auto", template) is None


def test_the_option_comes_before_the_template() -> None:
    assert tool_format("hermes", MISTRAL) is TOOLS["hermes"]
    nothing = tool_format("none", MISTRAL)
    assert nothing is not None and nothing.markers == ()
    assert reasoning_format("none", QWEN) == "none"
    assert reasoning_format("auto", QWEN) == "qwen3"
    assert reasoning_format("auto", MISTRAL) == "none"


_TEMPLATES = Path(__file__).with_name("chat_templates")
"""Chat templates from llama.cpp's models/templates (llama_cpp_python 0.3.36), under the licence in their row."""


@by_table("file", "licence", "source", "name", "own")
def test_a_chat_template_names_its_parsers_and_they_read_the_calls_it_renders(
    file: str, licence: str, source: str, name: str, own: str
) -> None:
    text = (_TEMPLATES / f"{file}.jinja").read_text(encoding="utf-8")
    assert tool_format("auto", text) is TOOLS[name], source
    assert reasoning_format("auto", text) == own, licence
    arguments = {"s": 'Rome\n"x"', "i": 12, "b": True, "l": [1, "a"], "o": {"k": {"z": "v"}}}
    called = {"name": "look", "arguments": json.dumps(arguments)}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look."}]
    answer = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": called}],
    }
    template = ChatTemplate({"default": text}, {"bos_token": "<s>", "eos_token": "</s>"}, Path(file))
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": FUNCTIONS["look"]}}]
    asked = template.render(messages, tools=tools, add_generation_prompt=False)
    answered = template.render([*messages, answer], tools=tools, add_generation_prompt=False)
    same = next((at for at, (one, two) in enumerate(zip(asked, answered, strict=False)) if one != two), len(asked))
    output = answered[same:]
    assert parse(parser(name), output).values() == [["look", arguments]]
    assert "Look." in template.render(messages, tools=tools)


def test_every_value_of_the_options_is_a_row() -> None:
    for name, rows in (("tool_call_parser", TOOLS), ("reasoning_parser", REASONING)):
        assert {*rows, "auto", "none"} == set(OPTIONS[name].type.choices)
    assert {writer.split()[0] for writer in WRITERS} == set(TOOLS)


def test_ids_are_as_the_template_takes_them() -> None:
    own = TOOLS["hermes"]
    assert own.new_id().startswith("call_") and own.new_id() != own.new_id()
    assert len(TOOLS["mistral"].new_id()) == 9 and TOOLS["mistral"].new_id().isalnum()
    fitted = [TOOLS[name].fit_id("call_0123456789", "f", 2) for name in ("hermes", "mistral", "kimi_k2")]
    assert fitted == ["call_0123456789", "123456789", "functions.f:2"]


# -- every format ------------------------------------------------------------------------------------------------------


def pieces_of(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def check_every_split(make: MakeParser, text: str, answer: Answer) -> None:
    assert parse(make(), text) == answer
    assert parse(make(), *text) == answer
    for size in (2, 3, 5, 8, 13):
        assert parse(make(), *pieces_of(text, size)) == answer
    for at in range(1, len(text)):
        assert parse(make(), text[:at], text[at:]) == answer, at


@by_rows("writer", WRITERS)
def test_calls_are_found_as_the_model_meant_them_in_every_split(writer: str) -> None:
    for before, calls, after in CASES:
        text = write(writer, before, calls, after)
        answer = parse(parser(writer), text)
        assert answer.values() == [list(call) for call in calls]
        assert answer.content.strip() == before + after
        check_every_split(lambda: parser(writer), text, answer)  # called at once


_RECORDED = [json.loads(line) for line in Path(__file__).with_name("recorded.jsonl").read_bytes().splitlines()]


@by_rows("writer", sorted({row["format"] for row in _RECORDED}))
def test_recorded_outputs_are_read_as_they_were_meant_in_every_split(writer: str) -> None:
    for row in (row for row in _RECORDED if row["format"] == writer):
        make = partial(parser, writer, row["tools"], row["reasoning"], row["prompt"])
        found = parse(make(), row["text"])
        assert [found.content.strip(), found.values(), found.reasoning.strip()] == row["answer"], row["source"]
        check_every_split(make, row["text"], found)


@by_rows("writer", WRITERS)
def test_an_output_that_is_cut_off_has_the_beginning_of_its_calls(writer: str) -> None:
    before, calls, after = CASES[14]
    text = write(writer, before, calls, after)
    whole = parse(parser(writer), text)
    for end in range(len(text)):
        cut = parse(parser(writer), text[:end])
        assert cut == parse(parser(writer), *text[:end])
        assert len(cut.calls) <= len(whole.calls)
        for (name, arguments), (own_name, own) in zip(cut.calls, whole.calls, strict=False):
            assert name == own_name and (own.startswith(arguments) or own.startswith(arguments[:-1]))


def markup(writer: str) -> st.SearchStrategy[str]:
    """Texts of what the format is made of, right and wrong."""
    own = TOOLS[writer.split()[0]]
    parts = {own.section, own.close, own.between, *own.markers, *own.quotes}
    for call in own.call:
        parts |= {call.opener, call.middle, *call.closers, *(call.name_ends.texts if call.name_ends else ())}
    if own.parameter is not None:
        parts |= {own.parameter.opener, *own.parameter.inner, own.parameter.closer, own.parameter.text_end}
    whole = [write(writer, *case) for case in CASES[:12]]
    own_parts = [*sorted(parts - {""}), *whole, *(text[: len(text) // 2] for text in whole)]
    return st.lists(st.sampled_from(own_parts) | st.sampled_from(_PARTS) | st.text(max_size=4), max_size=12).map(
        "".join
    )


@pytest.mark.parametrize("writer", WRITERS)
@given(data=st.data())
def test_no_text_is_an_error_and_no_split_changes_it(writer: str, data: st.DataObject) -> None:
    text = data.draw(markup(writer))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    own = data.draw(st.sampled_from(["none", *map(str, REASONING)]))
    prompt = data.draw(st.sampled_from(["", *(row.open for row in REASONING.values())]))
    make = partial(parser, writer, FUNCTIONS, own, prompt)
    whole = parse(make(), text)
    assert parse(make(), *text) == whole
    assert parse(make(), *(text[start:end] for start, end in pairwise([0, *cuts, len(text)]))) == whole


@by_rows("writer", [writer for writer in WRITERS if writer != "openai"])
def test_calls_in_their_usual_form_behind_another_one_are_read_at_once(writer: str) -> None:
    """Each has its arguments in one piece; read in steps, they come in several, or take ten times as long."""
    calls = [("look", {"s": f"at {number}", "other": number}) for number in range(5)]
    events = parser(writer).feed(write(writer, "", calls, ""))
    starts = [at for at, event in enumerate(events) if isinstance(event, CallStart)]
    assert [later - sooner for sooner, later in pairwise(starts[1:])] == [2, 2, 2]
    assert parse(parser(writer), write(writer, "", calls, "")).values() == [list(call) for call in calls]


@by_rows("writer", WRITERS)
def test_a_call_in_its_usual_form_behind_another_one_takes_few_steps(writer: str) -> None:
    """Steps are calls of Python's functions; read in steps, such a call takes more than twenty."""

    def steps(count: int) -> int:
        own, text = parser(writer), write(writer, "", [("look", {"s": "at you"})] * count, "")
        seen: list[str] = []
        before = sys.getprofile()
        sys.setprofile(lambda _, event, __: seen.append(event))
        try:
            own.feed(text)
        finally:
            sys.setprofile(before)
        return seen.count("call")

    steps(3)  # the first time patterns are compiled
    assert (steps(60) - steps(20)) / 40 < 16


@given(text=st.lists(st.sampled_from([*'\\"ndux4é \n\t\0', "\\'", "\\\\", "\\n", "\u2028"]), max_size=8).map("".join))
@example("\\'")
@example('"\\"')
@example('\\\\"')
@example("\n")
def test_a_string_of_python_means_the_same_in_every_call(text: str) -> None:
    """The first call is read in steps, the others at once if they are in their usual form."""
    output = "[" + ", ".join([f"look(s='{text}')"] * 3) + "]"
    found = parse(parser("llama4_pythonic"), output)
    assert parse(parser("llama4_pythonic"), *output) == found
    first, *others = found.calls
    assert len(others) < 2 or others == [first, first]


@pytest.mark.slow
@by_rows("size", [16, 1 << 20])
@by_rows("writer", WRITERS)
def test_the_cost_grows_with_the_output_and_no_faster(writer: str, size: int) -> None:
    def output(length: int) -> list[str]:
        long = write(writer, "", [("look", {"s": "The wolf ran.\n" * (length // 14), "l": ["a"] * (length // 64)})], "")
        return pieces_of(long + write(writer, "", [("look", {"i": 1})] * (length // 64), ""), size)

    def cost(pieces: list[str]) -> float:
        return seconds(lambda: parse(parser(writer), *pieces))

    short, long = (cost(output(length)) for length in (1 << 13, 1 << 17))
    assert long < 80 * short  # 16 times as long; 256 if each piece cost as much as all before it


@by_rows("writer", WRITERS)
def test_blanks_in_a_call_without_an_end_cost_no_more_than_other_text(writer: str) -> None:
    calls = write(writer, "", [("look", {"s": "\n" * 8192})] * 2, "")
    whole, _, _ = calls.rpartition("n" if "\\n" in calls else "\n")
    first, name, second = whole.rpartition("look")

    def cost(blanks: str) -> float:
        return seconds(lambda: parse(parser(writer), first + name + blanks + second))

    assert cost(60 * " ") < 20 * cost("")


@by_rows(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"anyOf": [{"type": "string"}, {"enum": [1, None, 2.5, [], {}, True]}]},
         {"string", "integer", "number", "null", "array", "object", "boolean"}),
        ({"$ref": "#/$defs/a"}, {"string"}),
        ({"allOf": [{"const": "x"}]}, {"string"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "elsewhere"}, set()),
        ({"type": 3, "anyOf": 4}, set()),
        (None, set()),
    ],
)  # fmt: skip
def test_the_types_of_a_parameter_are_those_of_its_schema(schema: Any, types: set[str]) -> None:
    root = {"$defs": {"a": {"type": "string"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}]}}}
    assert types_in(schema, root) == types


@pytest.mark.parametrize(
    ("schema", "key", "member"),
    [
        ({"properties": {"a": {"type": "string"}}}, "a", {"type": "string"}),
        ({"properties": {"a": {"type": "string"}}}, "b", None),
        ({"items": {"type": "integer"}}, None, {"type": "integer"}),
        ({"$ref": "#/$defs/object"}, "a", {"type": "null"}),
        ({"$ref": "#/$defs/list"}, None, {"type": "boolean"}),
        ({"$ref": "#/$defs/none"}, "a", None),
        ({"$ref": 5}, "a", None),
        ({"properties": 5}, "a", None),
        (None, "a", None),
    ],
)
def test_the_schema_of_a_member_is_found_behind_a_reference(schema: Any, key: str | None, member: Any) -> None:
    object_, list_ = {"properties": {"a": {"type": "null"}}}, {"items": {"type": "boolean"}}
    assert member_of(schema, key, {"$defs": {"object": object_, "list": list_}}) == member


@by_table("own", "prompt", "text", "answer")
def test_reasoning_is_found_as_the_model_writes_it(own: str, prompt: str, text: str, answer: list[Any]) -> None:
    make = partial(
        parser, "kimi_k2" if "begin|>" in text else "openai" if own == "gpt_oss" else "gemma4", None, own, prompt
    )
    assert parse(make(), text) == parse(make(), *text) == Answer.of(*answer)


def test_what_is_held_back_and_what_is_nested_is_bounded() -> None:
    blanks = " " * (MOST_BLANKS + 1)
    assert parse(plain(), f"{blanks}<think>Hm.</think>") == Answer(f"{blanks}<think>Hm.</think>")
    far = parse(parser("glm4"), f"<tool_call>look<arg_key>s</arg_key><arg_value>a</arg_value>{blanks}</tool_call>")
    assert far.calls[0][1].startswith('{"s": "a</arg_value> ')
    mark = "]<]minimax[>[<"
    deep = parse(parser("minimax_m3"), f'{mark}tool_call>{mark}invoke name="look">' + f"{mark}a>" * 5000)
    assert deep.calls[0][0] == "look"
    long = parse(parser("seed_oss"), f"<function=look><parameter=l>{['a'] * 20_000}</parameter></function>")
    assert parse(parser("seed_oss"), f"<seed:tool_call>{long.content}").values() == [
        ["look", {"l": str(["a"] * 20_000)}]
    ]


def test_the_markers_of_reasoning_are_seen() -> None:
    assert reasoning_markers("qwen3") == ("<think>", "</think>")
    of_channels = {f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call", "return")}
    assert of_channels == set(reasoning_markers("gpt_oss")) == set(TOOLS["openai"].markers)
    assert reasoning_markers("none") == ()
