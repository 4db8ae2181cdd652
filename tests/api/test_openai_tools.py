"""Models with chat templates that know tools and reasoning."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from djl_trtllm.api.base import Prompt
from djl_trtllm.api.chat import Parsing, ToolUse, fit_messages, read_tool_use
from djl_trtllm.api.dialects.openai.responses import ChatEncoder, ParsedChatStreamEncoder, Response
from djl_trtllm.api.output_parsers import (
    CallArguments,
    CallStart,
    Content,
    Event,
    OutputParser,
    PlainParser,
    Reasoning,
    ToolFormat,
    call_parser,
)
from djl_trtllm.api.parameters import Problems
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import FinishReason, GuideKind, OutputChunk, SequenceResult, Token
from djl_trtllm.service.model import Model
from tests.api.models import check_golden, parse_lines
from tests.support.dialogues import parse
from tests.support.in_process import played_model
from tests.support.tables import by_rows, table

HERMES = "{# <tool_call> #}{% if tools %}{{ tools | tojson }}{% endif %}{{ messages | tojson }}"
MISTRAL = HERMES.replace("<tool_call>", "[TOOL_CALLS]")

WEATHER: dict[str, Any] = table(__file__, "WEATHER")
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}


def tool_model(tokenizer: Tokenizer, template: str, **options: Any) -> Model:
    special: dict[str, str] = {}
    own = Tokenizer(
        tokenizer.raw, special_tokens=special, end_ids=[2], templates={"default": template}, origin=Path("model")
    )
    return played_model(own, **options)


Values = dict[str, Any]
WEATHER_SCHEMA = WEATHER["function"]["parameters"]


def use(
    tokenizer: Tokenizer, template: str = HERMES, /, options: Values | None = None, **values: Any
) -> ToolUse | None:
    problems = Problems()
    found = read_tool_use(values, tool_model(tokenizer, template, **(options or {})), problems)
    assert problems == Problems()
    return found


def problems_of(tokenizer: Tokenizer, template: str = HERMES, /, **values: Any) -> Problems:
    problems = Problems()
    read_tool_use(values, tool_model(tokenizer, template), problems)
    return problems


def schema(found: ToolUse | None) -> Any:
    assert found is not None and found.guide is not None and found.guide.kind is GuideKind.JSON_SCHEMA
    return json.loads(found.guide.value)


@pytest.mark.parametrize("values", [{}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_there_is_nothing_to_do(tokenizer: Tokenizer, values: Values) -> None:
    assert use(tokenizer, "no template for them", **values) is None


def test_the_parser_is_that_of_the_model(tokenizer: Tokenizer) -> None:
    found = use(tokenizer, tools=[WEATHER], parallel_tool_calls=False)
    assert found is not None and found.parser is not None
    assert parse(found.parser(), CALL).calls == (("weather", '{"city": "Rome"}'),)
    assert (found.shown_tokens, found.guide, found.parallel) == (("<tool_call>", "</tool_call>"), None, False)
    unparsed = use(tokenizer, options={"tool_call_parser": "none"}, tools=[WEATHER])
    assert unparsed is not None and unparsed.parser is None


def test_required_calls_are_a_list_by_a_guide(tokenizer: Tokenizer) -> None:
    found = use(tokenizer, "{{ tools }}", tools=[WEATHER, TIME], tool_choice="required")
    assert found is not None and found.parser is not None
    assert parse(found.parser(), '[{"name": "time"}]').calls == (("time", "{}"),)
    described = schema(found)
    assert (described["type"], described["minItems"]) == ("array", 1) and "maxItems" not in described
    first, second = described["items"]["anyOf"]
    assert first["properties"] == {"name": {"type": "string", "enum": ["weather"]}, "parameters": WEATHER_SCHEMA}
    assert second["properties"]["parameters"] == {"type": "object", "properties": {}}
    assert first["required"] == second["required"] == ["name", "parameters"]
    one = use(tokenizer, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert schema(one)["maxItems"] == 1


def test_a_named_call_has_the_guide_of_its_arguments(tokenizer: Tokenizer) -> None:
    found = use(tokenizer, tools=[TIME, WEATHER], tool_choice={"name": "weather"})
    assert found is not None and found.parser is not None
    assert parse(found.parser(), "{}").calls == (("weather", "{}"),)
    assert schema(found) == WEATHER_SCHEMA


@pytest.mark.parametrize(("strict", "choice"), [(True, "required"), (True, {"name": "weather"}), (None, "required")])
def test_a_strict_function_makes_the_guide_strict(tokenizer: Tokenizer, strict: bool | None, choice: Any) -> None:
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": strict}}
    found = use(tokenizer, tools=[TIME, tool], tool_choice=choice)
    assert found is not None and found.guide is not None and found.guide.strict is bool(strict)


def with_definition(name: str, definition: Values) -> Values:
    return {"type": "function", "function": {"name": name, "parameters": {"$defs": {"City": definition}}}}


def test_definitions_go_to_the_root_of_the_schema(tokenizer: Tokenizer) -> None:
    city = {"type": "string"}
    tools = [with_definition("a", city), with_definition("b", city)]
    assert schema(use(tokenizer, tools=tools, tool_choice="required"))["$defs"] == {"City": city}
    tools[1] = with_definition("b", {"type": "number"})
    refused = problems_of(tokenizer, tools=tools, tool_choice="required")
    assert refused.invalid == [
        "'tools' cannot be turned into one JSON schema (\"City\" in $defs differs between functions)"
    ]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"tool_choice": "required"}, "there are no 'tools'"),
        ({"tool_choice": {"name": "f"}, "tools": []}, "there are no 'tools'"),
        ({"tool_choice": {"name": "f"}, "tools": [WEATHER, TIME]}, 'expected one of the tools, ["time","weather"]'),
        ({"tool_choice": "required", "tools": [WEATHER], "guide": 1}, "another parameter constrains the output too"),
        ({"tool_choice": "required", "tools": [with_definition("f", {"title": "x" * 70_000})]}, "at most 65536"),
    ],
)
def test_what_cannot_be_is_refused(tokenizer: Tokenizer, values: Values, named: str) -> None:
    (told,) = problems_of(tokenizer, **values).invalid
    assert named in told


def test_a_model_that_has_no_place_for_tools_is_reported(tokenizer: Tokenizer) -> None:
    (told,) = problems_of(tokenizer, "{{ messages }}", tools=[WEATHER]).unsupported
    assert "no place for tools" in told
    (told,) = problems_of(tokenizer, "{{ tools }}", tools=[WEATHER]).unsupported
    assert "set option.tool_call_parser to one of hermes, " in told


@pytest.mark.parametrize("definitions", [[], "City", 3, None])
def test_definitions_that_are_none_are_refused(tokenizer: Tokenizer, definitions: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$defs": definitions}}}
    (told,) = problems_of(tokenizer, tools=[tool], tool_choice="required").invalid
    assert '$defs of "f" is no object' in told


def test_a_schema_that_is_nested_too_deeply_is_refused(tokenizer: Tokenizer) -> None:
    deep: Values = {}
    for _ in range(1000):
        deep = {"items": deep}
    for tools in ([with_definition("f", deep)], [with_definition("f", deep), with_definition("g", dict(deep))]):
        (told,) = problems_of(tokenizer, tools=tools, tool_choice="required").invalid
        assert "cannot be turned into one JSON schema" in told


def call(arguments: Any, call_id: str = "call_0123456789") -> Values:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def fit(tokenizer: Tokenizer, template: str, *messages: Values) -> list[Values]:
    problems = Problems()
    fitted = fit_messages(list(messages), tool_model(tokenizer, template), problems)
    assert problems == Problems()
    found: list[Values] = fitted["messages"]
    return found


def test_messages_without_calls_stay_as_they_are(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x", "name": "y"}]
    assert fit(tokenizer, HERMES, *messages) == messages


def test_calls_keep_their_arguments_and_contents_are_text(tokenizer: Tokenizer) -> None:
    calls = [call(arguments) for arguments in ('{"a": 1}', {"a": 1}, "", None, "broken {")]
    message: Values = {"role": "assistant", "content": None, "tool_calls": calls}
    (fitted,) = fit(tokenizer, HERMES, message)
    assert fitted["tool_calls"] == calls
    assert (message["content"], fitted["content"]) == (None, "")


def test_no_template_is_rendered_where_requests_are_read(tokenizer: Tokenizer) -> None:
    endless = "{# <tool_call> #}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    message = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    assert fit(tokenizer, endless, message) == [message]


def test_ids_are_as_long_as_the_template_wants_them(tokenizer: Tokenizer) -> None:
    messages: list[Values] = [
        {"role": "assistant", "content": "", "tool_calls": [call("{}")]},
        {"role": "tool", "content": "sunny", "tool_call_id": "call_0123456789"},
    ]
    assistant, tool = fit(tokenizer, MISTRAL, *messages)
    (alone,) = fit(tokenizer, MISTRAL, messages[1])
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == alone["tool_call_id"] == "123456789"


def test_ids_name_the_function_where_the_template_wants_it(tokenizer: Tokenizer) -> None:
    kimi = HERMES.replace("<tool_call>", "<|tool_calls_section_begin|>")
    answer: Values = {"role": "tool", "content": "sunny", "tool_call_id": "call_1"}
    asked: Values = {"role": "assistant", "content": "", "tool_calls": [call("{}", "call_0"), call("{}", "call_1")]}
    first, second, unknown = fit(tokenizer, kimi, asked, answer, answer | {"tool_call_id": "call_9"})
    assert [each["id"] for each in first["tool_calls"]] == ["functions.f:0", "functions.f:1"]
    assert [second["tool_call_id"], unknown["tool_call_id"]] == ["functions.f:1", "call_9"]


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_key(tokenizer: Tokenizer, calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert fit(tokenizer, HERMES, message) == [{"role": "assistant", "content": "x"}]


@by_rows("calls", [3, {"a": 1}, ["x"], [{}], [{"function": {"name": 3}}], [call(7)], [call([])]])
def test_what_is_no_call_is_named(tokenizer: Tokenizer, calls: Any) -> None:
    problems = Problems()
    messages: list[Values] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    fit_messages(messages, tool_model(tokenizer, HERMES), problems)
    (told,) = problems.invalid
    assert told.startswith("'messages[1].tool_calls[0]' is ")
    assert orjson.dumps(messages)


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OUTPUT = f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}"
QWEN3 = "qwen3"


class Format(ToolFormat):
    """Calls have the same id every time."""

    def new_id(self) -> str:
        return "call_0"


FORMAT = Format.read({"call": "<tool_call>$object</tool_call>"})


def tools(parallel: bool = True) -> ToolUse:
    return ToolUse(functools.partial(call_parser, FORMAT, {}), FORMAT, ("<tool_call>",), None, parallel)


def chunks(text: str, size: int, reason: FinishReason = FinishReason.END_TOKEN, index: int = 0) -> list[OutputChunk]:
    """The text in tokens of some characters, then its end."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    tokens = [OutputChunk(index, [Token(at, piece, -0.5, False)], None) for at, piece in enumerate(pieces)]
    return [*tokens, OutputChunk(index, [], SequenceResult(reason, len(pieces), None, None))]


def encode(
    text: str,
    size: int = 7,
    *,
    stream: bool = True,
    parsing: Parsing | None = None,
    prompt: str = "?",
    reason: FinishReason = FinishReason.END_TOKEN,
    **view: Any,
) -> bytes:
    response = Response("id", "wolf", id="0123", created=1700000000, stream=stream, **view)
    encoder = (ParsedChatStreamEncoder if stream else ChatEncoder)(response, parsing or Parsing(tools(), QWEN3))
    encoder.begin(Prompt(prompt, 3))
    parts = [chunk for index in range(response.n) for chunk in chunks(text, size, reason, index)]
    return b"".join([encoder.encode(chunk) for chunk in parts])


def whole(text: str, **view: Any) -> Any:
    return json.loads(encode(text, stream=False, **view))["choices"][0]


def joined(body: bytes, index: int = 0) -> dict[str, Any]:
    """The message that a client puts together of the deltas."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "reason": None}
    for event in parse_lines(body):
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"]["arguments"]
            message["reason"] = choice["finish_reason"] or message["reason"]
    return message


ROME = ["weather", '{"city": "Rome"}']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_an_answer_with_everything_is_as_stored(stream: bool, logprobs: bool) -> None:
    name = "openai_tools" + "_stream" * stream + "-logprobs" * logprobs
    check_golden(name, encode(OUTPUT, 9, stream=stream, logprobs=logprobs, include_usage=True))


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_streams_and_whole_answers_are_the_same_however_the_text_comes(size: int) -> None:
    expected = {"content": "I look.", "reasoning_content": "Where?", "calls": [ROME, ROME], "reason": "tool_calls"}
    body = encode(OUTPUT, size, n=2)
    assert joined(body) == joined(body, 1) == expected
    for choice in json.loads(encode(OUTPUT, size, stream=False, n=2))["choices"]:
        message = choice["message"]
        assert [message["content"], message["reasoning_content"]] == ["I look.", "Where?"]
        assert [list(call["function"].values()) for call in message["tool_calls"]] == [ROME, ROME]
        assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_parsed_as_it_comes_and_not_at_its_end(stream: bool) -> None:
    class Watched(PlainParser):
        def feed(self, text: str) -> list[Event]:
            fed.append(text)
            return super().feed(text)

    fed: list[str] = []
    response = Response("id", "wolf", stream=stream)
    parsing = Parsing(ToolUse(Watched, FORMAT), "none")
    encoder = (ParsedChatStreamEncoder if stream else ChatEncoder)(response, parsing)
    encoder.begin(Prompt("?", 3))
    for number, chunk in enumerate(chunks("The wolf", 2)[:4], 1):
        encoder.encode(chunk)
        assert len(fed) == number


def test_an_answer_of_calls_has_no_content() -> None:
    message = whole(CALL)["message"]
    assert message["content"] is None and "reasoning_content" not in message
    plain = whole("The wolf.")
    assert plain["message"] == {"role": "assistant", "content": "The wolf.", "refusal": None}
    assert (plain["finish_reason"], whole("")["message"]["content"]) == ("stop", "")


def test_one_call_is_returned_if_they_must_not_be_parallel() -> None:
    parsing = Parsing(tools(parallel=False), QWEN3)
    assert joined(encode(OUTPUT, parsing=parsing))["calls"] == [ROME]
    assert len(whole(OUTPUT, parsing=parsing)["message"]["tool_calls"]) == 1


def test_an_output_that_was_cut_short_says_so() -> None:
    cut = OUTPUT[:-30]
    assert joined(encode(cut, reason=FinishReason.LENGTH))["reason"] == "length"
    assert whole(cut, reason=FinishReason.LENGTH)["finish_reason"] == "length"


def test_every_token_has_its_log_probability_once() -> None:
    events = [choice for event in parse_lines(encode(OUTPUT, logprobs=True)) for choice in event["choices"]]
    shown = [token["token"] for choice in events if choice["logprobs"] for token in choice["logprobs"]["content"]]
    assert "".join(shown) == OUTPUT


@pytest.mark.parametrize(
    ("reasoning", "prompt", "text", "thought"),
    [
        (QWEN3, "<think>\n", "Hm.</think>Yes.", "Hm."),
        (QWEN3, "?", "Hm.</think>Yes.", ""),
        ("deepseek_r1", "?", "Hm.</think>Yes.", "Hm."),
        ("deepseek_r1", "<think>\n\n</think>\n\n", "Yes.", ""),
    ],
)
def test_the_prompt_may_have_begun_the_reasoning(reasoning: str, prompt: str, text: str, thought: str) -> None:
    parsing = Parsing(None, reasoning)
    assert joined(encode(text, parsing=parsing, prompt=prompt))["reasoning_content"] == thought
    assert whole(text, parsing=parsing, prompt=prompt)["message"].get("reasoning_content", "") == thought


def test_what_is_looked_for_decides_what_is_needed() -> None:
    none = "none"
    unparsed = ToolUse(None, FORMAT)
    assert [Parsing(None, none).needed, Parsing(unparsed, none).needed] == [False, False]
    assert [Parsing(tools(), none).needed, Parsing(None, QWEN3).needed] == [True, True]
    assert Parsing(tools(), none).shown_tokens == ("<tool_call>",)
    assert Parsing(None, QWEN3).shown_tokens == ("<think>", "</think>")


class Played(OutputParser):
    """Every feed has the same events."""

    def feed(self, text: str) -> list[Event]:
        return [Content("a"), Content("b"), Reasoning("c"), CallStart("f"), CallArguments("{"), CallArguments("}")]

    def finish(self) -> list[Event]:
        return [CallArguments(" "), Reasoning("d"), Reasoning("e")]


def test_events_of_one_kind_that_follow_each_other_are_one_delta() -> None:
    call = {"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}
    events = parse_lines(encode("x", 1, parsing=Parsing(ToolUse(Played, FORMAT), "none"), n=2))
    deltas = [event["choices"][0]["delta"] for event in events if event["choices"][0]["index"] == 1]
    assert deltas[1:-1] == [
        {"content": "ab"},
        {"reasoning_content": "c"},
        {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": " "}}]},
        {"reasoning_content": "de"},
    ]
