from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from djl_trtllm.errors import InvalidRequestError, TokenizerError
from djl_trtllm.model.chat_template import ChatTemplate, read_sources

USER = [{"role": "user", "content": "<hi> ü"}]


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, special, Path("model"))


def test_special_tokens_and_keywords_reach_the_template() -> None:
    chat = template("{{ bos_token }}{{ messages[0].content }}{{ mood }}{{ add_generation_prompt }}", bos_token="<s>")
    assert chat.render(USER, mood="!") == "<s><hi> ü!True"


def test_helpers_are_those_of_transformers() -> None:
    assert template("{{ messages | tojson }}").render(USER) == json.dumps(USER, ensure_ascii=False)
    assert template("{{ strftime_now('%Y') }}").render(USER).isdigit()
    assert template("{% for n in [1, 2] %}{% if n == 2 %}{% break %}{% endif %}{{ n }}{% endfor %}").render(USER) == "1"
    assert template("{% generation %}{{ messages[0].role }}{% endgeneration %}.").render(USER) == "user."
    assert template("  {% if true %}\n  a\n  {% endif %}\n").render(USER) == "  a\n"


def test_a_template_that_refuses_the_roles_is_the_requests_error() -> None:
    chat = template("{{ raise_exception('Conversation roles must alternate user/assistant') }}")
    with pytest.raises(InvalidRequestError, match="refuses these messages: Conversation roles must alternate"):
        chat.render(USER)


@pytest.mark.parametrize("messages", [[{}], ["text"], [{"role": "user"}], [None]])
def test_messages_of_another_shape_are_the_requests_error(messages: list[Any]) -> None:
    with pytest.raises(InvalidRequestError, match="failed on these messages"):
        template("{{ messages[0]['role'] + ': ' + messages[0]['content'] }}").render(messages)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(InvalidRequestError):
        template("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(USER)
    with pytest.raises(InvalidRequestError):
        template("{{ messages.append(1) }}").render(USER)


def test_a_template_that_is_not_jinja_is_found_at_load() -> None:
    with pytest.raises(TokenizerError, match=r"'default' of model is not valid Jinja: line 2"):
        template("ok\n{% if %}")


def test_the_tool_template_is_taken_for_tools_only() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools", "rag": "rag"}, {}, Path("model"))
    assert chat.render(USER) == "plain"
    assert chat.render(USER, tools=[{"type": "function"}]) == "tools"
    assert chat.render(USER, chat_template="rag") == "rag"
    with pytest.raises(InvalidRequestError, match="no chat template 'other'; it has"):
        chat.render(USER, chat_template="other")


@pytest.mark.parametrize(
    ("files", "config", "expected"),
    [
        ({}, {}, {}),
        ({}, {"chat_template": "a"}, {"default": "a"}),
        ({}, {"chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]},
         {"default": "a", "rag": "b"}),
        ({"chat_template.json": '{"chat_template": "c"}'}, {}, {"default": "c"}),
        ({"chat_template.jinja": "d", "chat_template.json": '{"chat_template": "c"}'}, {"chat_template": "a"},
         {"default": "d"}),
        ({"chat_template.jinja": "d", "additional_chat_templates/tool_use.jinja": "t"}, {},
         {"default": "d", "tool_use": "t"}),
    ],
)  # fmt: skip
def test_where_templates_come_from(
    tmp_path: Path, files: dict[str, str], config: dict[str, Any], expected: dict[str, str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_sources(tmp_path, config) == expected


def test_the_source_is_that_of_the_template_that_is_taken() -> None:
    chat = ChatTemplate({"default": "plain", "tool_use": "tools"}, {}, Path("model"))
    assert (chat.source(), chat.source(with_tools=True)) == ("plain", "tools")
    assert template("plain").source(with_tools=True) == "plain"
    assert ChatTemplate({}, {}, Path("model")).source() == ""


_CALLS = "{% for m in messages %}{% for call in m.tool_calls or [] %}BODY{% endfor %}{% endfor %}"


def rendered_call(body: str, arguments: Any) -> str:
    """What a template with this part for each tool call makes of a call with these arguments."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return template(_CALLS.replace("BODY", body)).render([{"role": "assistant", "content": "", "tool_calls": [call]}])


OBJECT = (
    "{% if call.function.arguments is mapping %}object {{ call.function.arguments | tojson }}{% else %}text{% endif %}"
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ call.function.arguments | tojson }}", '{"wolf": 1}'),
        ("{% for key, value in call.function.arguments.items() %}{{ key }}{{ value }}{% endfor %}", "wolf1"),
        ("{{ '```json' + call.function.arguments }}", '```json{"wolf":1}'),
        ("{{ call.function.arguments }}", '{"wolf":1}'),
        ("{% if call.function.arguments is string %}text{% endif %}", ""),
        (OBJECT, 'object {"wolf": 1}'),
    ],
)
@pytest.mark.parametrize("arguments", [{"wolf": 1}, '{"wolf":1}'])
def test_a_template_gets_arguments_as_it_takes_them(body: str, expected: str, arguments: Any) -> None:
    assert rendered_call(body, arguments) == expected


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


def test_the_caller_keeps_its_messages() -> None:
    call = {"function": {"name": "f", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    template("{{ messages }}").render(messages)
    assert messages == [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
