"""boto3's sagemaker-runtime, with this server as its endpoint: plain and as a response stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import boto3
import pytest
import requests
from huggingface_hub import AsyncInferenceClient, InferenceClient

from tests.clients.conftest import MESSAGES, MODEL, PROMPT, TOKENS
from tests.support.server import Server

TEXT = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS}}
CHAT = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}


@pytest.fixture
def runtime(server: Server) -> Any:
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    return boto3.client("sagemaker-runtime", endpoint_url=server.url, **keys)


def lines(runtime: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a response stream, whose parts may end anywhere."""
    answer = runtime.invoke_endpoint_with_response_stream(
        EndpointName=MODEL, ContentType="application/json", Body=json.dumps({**body, "stream": True})
    )
    data = b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])
    return [json.loads(line) for line in data.splitlines()]


def test_plain(runtime: Any, story: str, reply: str) -> None:
    given = {"EndpointName": MODEL, "ContentType": "application/json"}
    answer = runtime.invoke_endpoint(Body=json.dumps(TEXT), **given)
    assert json.loads(answer["Body"].read()) == {"generated_text": story}
    answer = runtime.invoke_endpoint(Body=json.dumps(CHAT), **given)
    assert json.loads(answer["Body"].read())["choices"][0]["message"]["content"] == reply


def test_response_stream(runtime: Any, story: str, reply: str) -> None:
    assert "".join(line["token"]["text"] for line in lines(runtime, TEXT)) == story
    chunks = [line for line in lines(runtime, CHAT) if line["choices"]]
    assert "".join(line["choices"][0]["delta"].get("content") or "" for line in chunks) == reply


def test_an_error_raises_model_error(runtime: Any) -> None:
    wrong = {**TEXT, "parameters": {"temperature": "hot"}}
    with pytest.raises(runtime.exceptions.ModelError, match="temperature"):
        runtime.invoke_endpoint(EndpointName=MODEL, ContentType="application/json", Body=json.dumps(wrong))
    with pytest.raises(runtime.exceptions.ModelError, match="temperature"):
        lines(runtime, wrong)


# -- huggingface_hub's InferenceClient on the base URL and on /invocations: text and chat, whole and streamed ----------

CHAT_huggingface: dict[str, Any] = {"max_tokens": TOKENS, "temperature": 0}


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
    assert client.chat_completion(MESSAGES, **CHAT_huggingface).choices[0].message.content == reply
    stream = client.chat_completion(MESSAGES, stream=True, **CHAT_huggingface)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == reply


def test_asynchronously(address: str, reply: str) -> None:
    async def both() -> tuple[str | None, str]:
        async with AsyncInferenceClient(address) as client:
            whole = await client.chat_completion(MESSAGES, **CHAT_huggingface)
            stream = await client.chat_completion(MESSAGES, stream=True, **CHAT_huggingface)
            parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            return whole.choices[0].message.content, "".join(parts)

    assert asyncio.run(both()) == (reply, reply)


@pytest.mark.parametrize("path", ["/v1/models/model:predict", "/predict"])
def test_the_fields_of_the_truss_document(server: Server, story: str, path: str) -> None:
    body: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "beam_width": 1,
        "bad_words_list": [],
        "stop_words_list": [],
        "repetition_penalty": 1.0,
    }
    session = requests.Session()
    session.trust_env = False
    with session.post(server.url + path, json=body, stream=True) as answer:
        assert answer.status_code == 200
        parts = list(answer.iter_content(chunk_size=None))
    assert b"".join(parts).decode() == story
    assert len(parts) > 1
    assert session.post(server.url + path, json={**body, "stream": False}).json() == {"text": story}
    session.close()
