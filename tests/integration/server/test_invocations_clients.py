"""OpenAI's and Hugging Face's clients, unmodified, on the address of /invocations."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import GenerationError
from openai.types.chat import ChatCompletionChunk

from djl_trtllm.model import Tokenizer
from tests.support.models import PROMPT
from tests.support.server import Server

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]


@pytest.fixture(params=["/invocations", "/invocations/v1"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + request.param, api_key="none", max_retries=0) as client:
        yield client


def test_openais_client_below_invocations(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    whole = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=7, temperature=0)
    stream = client.chat.completions.create(model="", messages=MESSAGES, max_tokens=7, temperature=0, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content != ""
    events = client.completions.create(model="", prompt=PROMPT, max_tokens=7, temperature=0, stream=True)
    assert "".join(event.choices[0].text for event in events) == tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    assert [model.id for model in client.models.list()] == ["scripted"]


def test_openais_client_on_exactly_invocations(server: Server) -> None:
    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        stream = client.post(
            "/invocations",
            cast_to=ChatCompletionChunk,
            body={"messages": MESSAGES, "max_tokens": 7, "temperature": 0, "stream": True},
            stream=True,
            stream_cls=openai.Stream[ChatCompletionChunk],
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def test_hugging_faces_client(server: Server, tokenizer: Tokenizer) -> None:
    client = InferenceClient(model=f"{server.url}/invocations")
    text = tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    assert client.text_generation(PROMPT, max_new_tokens=7) == text
    assert "".join(client.text_generation(PROMPT, max_new_tokens=7, stream=True)) == text
    whole = client.text_generation(PROMPT, max_new_tokens=7, details=True)
    assert whole.details and whole.details.tokens[0].logprob is not None
    *_, last = client.text_generation(PROMPT, max_new_tokens=7, stream=True, details=True)
    assert last.details and (last.details.generated_tokens, last.generated_text) == (7, text)
    with pytest.raises(GenerationError, match="scripted error"):
        list(client.text_generation(PROMPT, max_new_tokens=77, stream=True))
    chat = client.chat_completion(MESSAGES, max_tokens=7, temperature=0)  # type: ignore[arg-type]
    stream = client.chat_completion(MESSAGES, max_tokens=7, temperature=0, stream=True)  # type: ignore[arg-type]
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert streamed == chat.choices[0].message.content != ""


def test_accept_chooses_events_for_everyone(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "stream": True}
    lines = httpx.post(f"{server.url}/invocations", json=body)
    events = httpx.post(f"{server.url}/invocations", json=body, headers={"Accept": "text/event-stream"})
    assert lines.headers["content-type"] == "application/jsonlines" and lines.text.startswith('{"id"')
    assert events.headers["content-type"] == "text/event-stream" and events.text.endswith("data: [DONE]\n\n")
