"""litellm as `openai/`, `text-completion-openai/`, `sagemaker/` and `sagemaker_chat/`.

The last two have the server's address as `sagemaker_base_url`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import litellm
import pytest

from tests.clients.conftest import MESSAGES, MODEL, PROMPT, TOKENS
from tests.support.server import Server

LIMITS: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0, "num_retries": 0}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    # As parameters of the call, litellm would send them to the model.
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_REGION", "us-east-1")


def content(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def options(server: Server, provider: str, *, stream: bool = False) -> dict[str, Any]:
    """What leads a provider's requests to this server."""
    if provider == "openai":
        return {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none", "stream": stream}
    route = "invocations-response-stream" if stream else "invocations"
    url = f"{server.url}/endpoints/{MODEL}/{route}"
    return {"model": f"{provider}/{MODEL}", "sagemaker_base_url": url, "stream": stream}


@pytest.mark.parametrize("provider", ["openai", "sagemaker_chat"])
def test_chats(server: Server, reply: str, provider: str) -> None:
    whole = litellm.completion(messages=MESSAGES, **options(server, provider), **LIMITS)
    assert whole.choices[0].message.content == reply
    assert content(litellm.completion(messages=MESSAGES, **options(server, provider, stream=True), **LIMITS)) == reply


@pytest.mark.parametrize("provider", ["openai", "sagemaker_chat"])
def test_chats_asynchronously(server: Server, reply: str, provider: str) -> None:
    async def both() -> tuple[str, str]:
        whole = await litellm.acompletion(messages=MESSAGES, **options(server, provider), **LIMITS)
        stream = await litellm.acompletion(messages=MESSAGES, **options(server, provider, stream=True), **LIMITS)
        return whole.choices[0].message.content, "".join(
            [chunk.choices[0].delta.content or "" async for chunk in stream]
        )

    assert asyncio.run(both()) == (reply, reply)


def test_text_on_sagemaker(server: Server, story: str) -> None:
    """The text of the messages is the prompt. litellm raises a temperature of 0, so none is given."""
    given = {"messages": MESSAGES, "max_tokens": TOKENS, "num_retries": 0}
    whole = litellm.completion(**options(server, "sagemaker"), **given).choices[0].message.content
    assert whole == story
    stream = litellm.completion(**options(server, "sagemaker", stream=True), **given)
    assert content(stream) == story.lstrip()  # litellm drops the blank that a stream begins with

    async def both() -> tuple[str, str]:
        whole = await litellm.acompletion(**options(server, "sagemaker"), **given)
        stream = await litellm.acompletion(**options(server, "sagemaker", stream=True), **given)
        return whole.choices[0].message.content, "".join(
            [chunk.choices[0].delta.content or "" async for chunk in stream]
        )

    assert asyncio.run(both()) == (story, story.lstrip())


def test_completions(server: Server, story: str) -> None:
    given = {"model": f"text-completion-openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    assert litellm.text_completion(prompt=PROMPT, **given, **LIMITS).choices[0].text == story
    stream = litellm.text_completion(prompt=PROMPT, stream=True, **given, **LIMITS)
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == story
