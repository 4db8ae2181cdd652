"""OpenAI's client: both of its APIs, whole and streamed, and asynchronous."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest

from tests.clients.conftest import MODEL, PROMPT, TOKENS
from tests.support.server import Server

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["", MODEL])
def test_chats(client: openai.OpenAI, reply: str, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=TOKENS, temperature=0)
    assert whole.choices[0].message.content == reply
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, max_tokens=TOKENS, temperature=0
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == reply


def test_the_streaming_helper_gathers_a_chat(client: openai.OpenAI, reply: str) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=MESSAGES, temperature=0, stop=",", stream_options={"include_usage": True}
    ) as stream:
        completion = stream.get_final_completion()
    assert completion.choices[0].message.content == reply.partition(",")[0]
    assert completion.usage and completion.usage.completion_tokens <= TOKENS


def test_completions(client: openai.OpenAI, story: str) -> None:
    assert (
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=TOKENS, temperature=0).choices[0].text == story
    )
    stream = client.completions.create(model=MODEL, prompt=PROMPT, stream=True, max_tokens=TOKENS, temperature=0)
    assert "".join(chunk.choices[0].text for chunk in stream) == story


def test_many_chats_at_once(server: Server, reply: str) -> None:
    async def chats() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, stream=True, max_tokens=TOKENS, temperature=0
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*[one() for _ in range(20)])

    assert asyncio.run(chats()) == [reply] * 20


def test_a_stream_that_is_left_ends_on_the_server(client: openai.OpenAI) -> None:
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=400, stream=True) as stream:
        next(iter(stream))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


def test_a_model_that_was_trained_without_tools_calls_one_if_it_has_to(client: openai.OpenAI) -> None:
    parameters: dict[str, object] = {"type": "object", "properties": {"animal": {"enum": ["fox", "bear"]}}}
    parameters["required"] = ["animal"]
    tool: openai.types.chat.ChatCompletionToolParam = {
        "type": "function",
        "function": {"name": "find", "parameters": parameters, "strict": True},
    }
    with pytest.raises(openai.BadRequestError, match="tool_call_parser"):
        client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[tool])
    asked = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    (call,) = asked.message.tool_calls or []
    assert isinstance(call, openai.types.chat.ChatCompletionMessageFunctionToolCall)
    assert json.loads(call.function.arguments)["animal"] in ("fox", "bear")
    assert asked.finish_reason == "tool_calls"
    called: openai.types.chat.ChatCompletionMessageFunctionToolCallParam = {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": call.function.arguments},
    }
    result: openai.types.chat.ChatCompletionToolMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": "a bear",
    }
    asking: openai.types.chat.ChatCompletionAssistantMessageParam = {"role": "assistant", "tool_calls": [called]}
    messages = [*MESSAGES, asking, result]
    answered = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
    assert answered.choices[0].message.content


def test_an_answer_of_a_json_schema(client: openai.OpenAI) -> None:
    names = ["wolf", "girl"]
    schema: dict[str, object] = {"type": "string", "enum": names}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        response_format={"type": "json_schema", "json_schema": {"name": "who", "schema": schema, "strict": True}},
        temperature=0,
        max_tokens=TOKENS,
    )
    assert json.loads(answer.choices[0].message.content or "") in names
