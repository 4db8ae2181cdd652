"""huggingface_hub's InferenceClient on the base URL and on /invocations: text and chat, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.clients.conftest import MESSAGES, PROMPT, TOKENS
from tests.support.server import Server

CHAT: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}


@pytest.fixture(params=["", "/v1", "/invocations"])
def address(server: Server, request: pytest.FixtureRequest) -> str:
    return f"{server.url}{request.param}"


def test_text(address: str, story: str) -> None:
    if address.endswith("/v1"):
        pytest.skip("the address of OpenAI's API, which has no text generation")
    client = InferenceClient(address)
    assert client.text_generation(PROMPT, max_new_tokens=TOKENS) == story
    assert "".join(client.text_generation(PROMPT, max_new_tokens=TOKENS, stream=True)) == story
    whole = client.text_generation(PROMPT, max_new_tokens=TOKENS, details=True)
    assert whole.details and whole.details.generated_tokens == TOKENS
    *_, last = client.text_generation(PROMPT, max_new_tokens=TOKENS, details=True, stream=True)
    assert last.generated_text == story


def test_chats(address: str, reply: str) -> None:
    client = InferenceClient(address)
    assert client.chat_completion(MESSAGES, **CHAT).choices[0].message.content == reply
    stream = client.chat_completion(MESSAGES, stream=True, **CHAT)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == reply


def test_asynchronously(address: str, reply: str) -> None:
    async def both() -> tuple[str | None, str]:
        async with AsyncInferenceClient(address) as client:
            whole = await client.chat_completion(MESSAGES, **CHAT)
            stream = await client.chat_completion(MESSAGES, stream=True, **CHAT)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(both()) == (reply, reply)
