from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from djl_trtllm.api.openai.tools import ToolUse, fit_messages, read_tool_use
from djl_trtllm.api.output_parsers import NamedParser, RequiredParser, ToolFormat
from djl_trtllm.api.output_parsers.hermes import HermesParser
from djl_trtllm.api.parameters import Problems
from djl_trtllm.config import ToolCallFormat
from djl_trtllm.model import Tokenizer
from djl_trtllm.request import GuideKind
from tests.api.openai.tool_models import HERMES, MISTRAL, TIME, WEATHER, tool_model

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
    assert found is not None and found.parser is not None and isinstance(found.parser(), HermesParser)
    assert (found.shown_tokens, found.guide, found.parallel) == (("<tool_call>", "</tool_call>"), None, False)
    unparsed = use(tokenizer, options={"tool_call_parser": ToolCallFormat.NONE}, tools=[WEATHER])
    assert unparsed is not None and unparsed.parser is None


def test_required_calls_are_a_list_by_a_guide(tokenizer: Tokenizer) -> None:
    found = use(tokenizer, "{{ tools }}", tools=[WEATHER, TIME], tool_choice="required")
    assert found is not None and found.parser is not None and isinstance(found.parser(), RequiredParser)
    described = schema(found)
    assert (described["type"], described["minItems"]) == ("array", 1) and "maxItems" not in described
    first, second = described["items"]["anyOf"]
    assert first["properties"] == {"name": {"type": "string", "enum": ["weather"]}, "parameters": WEATHER_SCHEMA}
    assert second["properties"]["parameters"] == {"type": "object", "properties": {}}
    one = use(tokenizer, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False)
    assert schema(one)["maxItems"] == 1


def test_a_named_call_has_the_guide_of_its_arguments(tokenizer: Tokenizer) -> None:
    found = use(tokenizer, tools=[TIME, WEATHER], tool_choice={"name": "weather"})
    assert found is not None and found.parser is not None and isinstance(found.parser(), NamedParser)
    assert schema(found) == WEATHER_SCHEMA


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
    assert "set option.tool_call_parser to hermes" in told


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
    return fitted


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
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "123456789"


@pytest.mark.parametrize("calls", [None, []])
def test_no_calls_are_no_key(tokenizer: Tokenizer, calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert fit(tokenizer, HERMES, message) == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize("calls", [3, {"a": 1}, ["x"], [{}], [{"function": {"name": 3}}], [call(7)], [call([])]])
def test_what_is_no_call_is_named(tokenizer: Tokenizer, calls: Any) -> None:
    problems = Problems()
    messages: list[Values] = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    fit_messages(messages, tool_model(tokenizer, HERMES), problems)
    (told,) = problems.invalid
    assert told.startswith("'messages[1].tool_calls[0]' is ")
    assert orjson.dumps(messages)


def test_a_forced_call_has_a_name_and_parameters(tokenizer: Tokenizer) -> None:
    values: Values = {"tools": [TIME, WEATHER], "tool_choice": "required"}
    use = read_tool_use(values, tool_model(tokenizer, HERMES), Problems())
    assert use is not None and use.parallel
    guide = values["guide"] if use.guide is None else use.guide
    schema = orjson.loads(guide.value)
    assert [each["required"] for each in schema["items"]["anyOf"]] == [["name", "parameters"]] * 2
    assert ToolUse(None, ToolFormat(lambda names: HermesParser())).parallel


def test_the_id_of_an_answer_to_a_call_is_fitted_without_calls(tokenizer: Tokenizer) -> None:
    problems = Problems()
    (message,) = fit_messages(
        [{"role": "tool", "tool_call_id": "call_0123456789", "content": "x"}], tool_model(tokenizer, MISTRAL), problems
    )
    assert len(message["tool_call_id"]) == 9 and not problems.invalid
