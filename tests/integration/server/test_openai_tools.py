"""OpenAI's own client, unmodified, on models that say what the user says: tool calls and reasoning."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.openai.tool_models import NAMED, TIME, WEATHER
from tests.support.models import TINY_STORIES, scripted_model
from tests.support.server import Server, serving

ARGUMENTS = '{"city": "Rome"}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
OUTPUTS = {
    "hermes": f"<think>\nWhere?\n</think>\n\nI look.\n{CALL}\n{CALL}",
    "llama3_json": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}]',
}
MARKER = {"hermes": "<tool_call> </think>", "llama3_json": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
SPECIAL = {"hermes": (), "llama3_json": ("<|python_tag|>",), "mistral": ("[TOOL_CALLS]",)}
"""Markers that these models have as special tokens."""


def echoing_model(directory: Path, name: str) -> Path:
    """A model that repeats what the user said last, with the marks of a format in its chat template."""
    model = scripted_model(directory, {"features": ["json"]}, **{"option.model_name": name})
    # The engine repeats the prompt, to its end token.
    (model / "chat_template.jinja").write_text(
        f"{{# tools {MARKER[name]} #}}{{{{ messages[-1].content }}}}{{{{ eos_token }}}}"
    )
    config = json.loads((TINY_STORIES / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    config["additional_special_tokens"] += SPECIAL[name]
    size = len(json.loads((TINY_STORIES / "tokenizer.json").read_text())["model"]["vocab"])
    config["added_tokens_decoder"] = {
        str(size + at): {"content": marker, "special": True} for at, marker in enumerate(SPECIAL[name])
    }
    (model / "tokenizer_config.json").unlink()
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | {"vocab_size": size + len(SPECIAL[name])}))
    return model


@pytest.fixture(scope="module", params=OUTPUTS)
def model(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tool_server(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(echoing_model(tmp_path_factory.mktemp("tools") / "model", model)) as started:
        yield started


@pytest.fixture
def client(tool_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str, **more: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model="", messages=messages, temperature=0, **more)


def test_calls_are_answered_whole(client: openai.OpenAI, model: str) -> None:
    answer = ask(client, OUTPUTS[model], tools=[WEATHER, TIME], n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", ARGUMENTS)] * len(
            calls
        )
        assert len({call.id for call in calls}) == len(calls) == (2 if model == "hermes" else 1)
        assert choice.message.content == ("I look." if model == "hermes" else None)
        assert getattr(choice.message, "reasoning_content", None) == ("Where?" if model == "hermes" else None)
    assert answer.usage.completion_tokens > 20


def test_calls_are_streamed(client: openai.OpenAI, model: str) -> None:
    chunks = list(ask(client, OUTPUTS[model], tools=[WEATHER, TIME], stream=True, logprobs=True))
    calls: dict[int, list[str]] = {}
    reasoning = content = ""
    for choice in [chunk.choices[0] for chunk in chunks]:
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            if call.id:
                calls[call.index] = [call.function.name, ""]
            calls[call.index][1] += call.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert list(calls.values()) == [["weather", ARGUMENTS]] * (2 if model == "hermes" else 1)
    assert (content, reasoning) == (("I look.", "Where?") if model == "hermes" else ("", ""))


def test_the_clients_own_stream_puts_the_calls_together(client: openai.OpenAI, model: str) -> None:
    messages: Any = [{"role": "user", "content": OUTPUTS[model]}]
    tools: Any = [WEATHER]
    with client.chat.completions.stream(model="", messages=messages, tools=tools, temperature=0) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.message.tool_calls and choice.message.tool_calls[0].function.arguments == ARGUMENTS


def test_an_answer_goes_back_to_the_model_with_what_the_tool_said(client: openai.OpenAI, model: str) -> None:
    message = ask(client, OUTPUTS[model], tools=[WEATHER]).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "It is sunny."}
    messages: Any = [{"role": "user", "content": "Rome?"}, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(model="", messages=messages, tools=[WEATHER], temperature=0)  # type: ignore[list-item]
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("It is sunny.", "stop")


def test_a_stop_string_ends_a_call_and_is_not_part_of_it(client: openai.OpenAI, model: str) -> None:
    choice = ask(client, OUTPUTS[model], tools=[WEATHER], stop="Rome").choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.arguments, choice.finish_reason) == ('{"city": "', "tool_calls")
    cut = ask(client, OUTPUTS[model], tools=[WEATHER], max_tokens=8).choices[0]
    assert cut.finish_reason == "length"


def test_forced_calls_follow_a_guide(client: openai.OpenAI, model: str) -> None:
    listed = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]'
    for text, choice in ((listed, "required"), (ARGUMENTS, NAMED)):
        (call,) = ask(client, text, tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)


def test_text_that_is_no_call_is_text(client: openai.OpenAI, model: str) -> None:
    text = "The [wolf] <ran> {home}."
    assert ask(client, text, tools=[WEATHER]).choices[0].message.content == text
    assert ask(client, text, tools=[WEATHER], tool_choice="none").choices[0].message.content == text


@pytest.mark.slow
def test_the_embedded_engine_makes_the_calls_that_it_has_to(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(TINY_STORIES, directory)
    template = "{# tools <tool_call> #}{% for message in messages %}{{ message.content }}{% endfor %}"
    for place in (directory, directory / "engine"):
        (place / "chat_template.jinja").write_text(template)
    with (
        serving(directory) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        required: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
        for more in (required, {"tool_choice": NAMED}):
            choice = ask(client, "The wolf went to Rome.", tools=[WEATHER, TIME], max_tokens=200, **more).choices[0]
            (call,) = choice.message.tool_calls
            assert call.function.name in ("weather", "time")
            assert choice.finish_reason == "tool_calls" and type(json.loads(call.function.arguments)) is dict


def test_what_a_server_cannot_do_is_refused_by_name(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="no place for tools") as refused:
            ask(client, "x", tools=[WEATHER])
        assert refused.value.code == "unsupported_parameter"
