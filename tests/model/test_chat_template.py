from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import InvalidRequestError, TokenizerError
from djl_trtllm.model.chat_template import ChatTemplate, prepare, read_sources, render
from tests.support.tables import by_rows, by_table

USER = [{"role": "user", "content": "<hi> ü"}]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special, Path("model"))


@by_table("source", "text")
def test_a_template_has_what_it_has_in_transformers(source: str, text: str) -> None:
    assert template(source, bos_token="<s>").render(USER, mood="!") == text


@by_table("source", "says")
def test_what_a_template_refuses_or_may_not_do_is_the_requests_error(source: str, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        template(source).render(USER)


@pytest.mark.parametrize("messages", [[{}], ["text"], [{"role": "user"}], [None]])
def test_messages_of_another_shape_are_the_requests_error(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="failed on these messages"):
        template("{{ messages[0]['role'] + ': ' + messages[0]['content'] }}").render(messages)


def test_a_template_that_is_not_jinja_is_found_at_load() -> None:
    with pytest.raises(TokenizerError, match=r"'default' of model is not valid Jinja: line 2"):
        template("ok\n{% if %}").compile()


def test_the_tool_template_is_taken_for_tools_only() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"}, {}, Path("model"))
    assert chat.render(USER) == chat.source() == "plain"
    assert chat.render(USER, tools=[{"type": "function"}]) == chat.source(with_tools=True) == "tools"
    assert chat.render(USER, chat_template="rag") == "rag"
    with pytest.raises(InvalidRequestError, match="no chat template 'other'; it has"):
        chat.render(USER, chat_template="other")
    assert template("plain").source(with_tools=True) == "plain"
    assert ChatTemplate({}, {}, Path("model")).source() == ""


@by_table("files", "config", "expected")
def test_where_templates_come_from(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], expected: dict[str, str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_sources(tmp_path, config) == expected


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja"])
def test_a_template_that_is_no_text_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes("Grüße".encode("latin-1"))
    with pytest.raises(TokenizerError, match=f"{name} is not UTF-8 text .*; save it as UTF-8"):
        read_sources(tmp_path, {})


_CALLS = "{% for m in messages %}{% for call in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"


def rendered_call(body: str, arguments: Any) -> str:
    """What a template with this part for each tool call makes of a call with these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return template(_CALLS.replace("BODY", body)).render([{"role": "assistant", "content": "", "tool_calls": [call]}])


OBJECT = (
    "{% if call.function.arguments is mapping %}object {{ call.function.arguments | tojson }}{% else %}text{% endif %}"
)


@by_table("body", "expected")
@by_rows("arguments", [{"wolf": 1}, '{"wolf":1}'])
def test_a_template_gets_arguments_as_it_takes_them(body: str, expected: str, arguments: Any) -> None:
    assert rendered_call(body, arguments) == expected


STRICT = """
{%- macro require(holds) %}{% if not holds %}{{ raise_exception("no") }}{% endif %}{% endmacro %}
{%- set ns = namespace(id="") %}
{%- for m in messages %}
  {{- require(m.role in ("user", "assistant", "tool")) }}
  {{- require(m.role != "tool" or (m.tool_call_id == ns.id and m.name and m.content)) }}
  {{- require(m.role != "user" or m.content) }}
  {%- for call in m.tool_calls or [] %}
    {{- require(call.id | length == 9 and call.type == "function" and call.function.name) }}
    {%- set ns.id = call.id %}
    {{- "```" + call.function.arguments }}
  {%- endfor %}
{%- endfor %}
{%- for tool in tools or [] %}
  {%- set f = tool.function %}
  {{- require(tool.type == "function" and f.name and f.description is defined and f.parameters is mapping) }}
{%- endfor %}
{{- require(tools and messages[0].role == "user" and messages[-1].role == "tool") }}
"""
"""A template that takes arguments as text, and whole conversations with tools only; ids have nine characters, as those
of Mistral."""


def test_a_strict_template_is_tried_with_a_whole_conversation() -> None:
    call = {"id": "123456789", "type": "function", "function": {"name": "f", "arguments": {"wolf": 1, "é": 2}}}
    conversation: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "123456789", "name": "f"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert template(STRICT).render(conversation, tools=tools).strip() == '```{"wolf":1,"é":2}'


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    assert rendered_call(OBJECT, arguments) == "object {}"
    assert rendered_call("{{ '```' + call.function.arguments }}", arguments or None) == "```{}"


@pytest.mark.parametrize("arguments", ["broken {", "[1]", "[" * 100_000, "9" * 5000])
def test_arguments_that_are_no_json_object_stay_text(arguments: str) -> None:
    assert rendered_call(OBJECT, arguments) == "text"
    assert rendered_call("{{ '```' + call.function.arguments }}", arguments) == "```" + arguments


@pytest.mark.parametrize("calls", [3, {"a": 1}, [3], [{}], [{"function": "f"}]])
def test_what_is_no_call_is_left_to_the_template(calls: Any) -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "user", "content": "x"}]
    assert template("{{ messages[0].tool_calls | tojson }}").render(messages) == json.dumps(calls)
    messages = [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    before = json.dumps(messages)
    template("{{ messages }}").render(messages)
    assert json.dumps(messages) == before  # the caller keeps its messages


def test_a_process_renders_what_it_has_prepared_and_says_why_it_cannot() -> None:
    source = "{{ bos }}{{ messages[0].content }}{% if fail %}{{ raise_exception(fail) }}{% endif %}"
    prepare({"default": source}, {"bos": "<s>"}, Path("here"))
    wolf = [{"role": "user", "content": "a wolf \ud800"}]
    assert render(pickle.dumps((wolf, {}))) == "<s>a wolf \ud800"
    refused: list[dict[str, Any]] = [
        {"fail": "not so"},
        {"chat_template": "other"},
        {"messages": 1},
        {"chat_template": []},
    ]
    for keywords in refused:
        with pytest.raises(InvalidRequestError, match="template"):
            render(pickle.dumps((wolf, keywords)))
