"""langchain-openai's chat and text models, and langchain-aws's SagemakerEndpoint over boto3."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import boto3
import pytest
from langchain_aws.llms import SagemakerEndpoint
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.conftest import MODEL, PROMPT, TOKENS
from tests.support.server import Server


class ContentHandler(LLMContentHandler):  # type: ignore[misc]
    """The one of langchain's documentation, for this schema."""

    content_type = "application/json"
    accepts = "application/json"

    def transform_input(self, prompt: str, model_kwargs: dict[str, Any]) -> bytes:
        return json.dumps({"inputs": prompt, "parameters": model_kwargs}).encode()

    def transform_output(self, output: Any) -> str:
        text: str = json.loads(output.read())["generated_text"]
        return text


class StreamHandler(ContentHandler):
    """A stream's lines: langchain-aws hands over one line at a time."""

    accepts = "application/jsonlines"

    def transform_input(self, prompt: str, model_kwargs: dict[str, Any]) -> bytes:
        return json.dumps({"inputs": prompt, "parameters": model_kwargs, "stream": True}).encode()

    def transform_output(self, output: Any) -> str:
        text: str = json.loads(output)["token"]["text"]
        return text


@pytest.fixture
def given(server: Server) -> dict[str, Any]:
    return {
        "base_url": f"{server.url}/v1",
        "api_key": "none",
        "model": MODEL,
        "max_tokens": TOKENS,
        "temperature": 0,
        "max_retries": 0,
    }


@pytest.fixture
def runtime(server: Server) -> Any:
    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    return boto3.client("sagemaker-runtime", endpoint_url=server.url, **keys)


def test_chats(given: dict[str, Any], reply: str) -> None:
    chat = ChatOpenAI(**given)
    assert chat.invoke(PROMPT).content == reply
    assert "".join(str(part.content) for part in chat.stream(PROMPT)) == reply
    assert [message.content for message in asyncio.run(chat.abatch([PROMPT] * 5))] == [reply] * 5


def test_completions(given: dict[str, Any], story: str) -> None:
    model = OpenAI(**given)
    assert model.invoke(PROMPT) == story
    assert "".join(model.stream(PROMPT)) == story


def test_sagemakers_endpoint(runtime: Any, story: str) -> None:
    given = {"endpoint_name": MODEL, "client": runtime, "model_kwargs": {"max_new_tokens": TOKENS}}
    assert SagemakerEndpoint(content_handler=ContentHandler(), **given).invoke(PROMPT) == story
    streaming = SagemakerEndpoint(content_handler=StreamHandler(), streaming=True, **given)
    assert "".join(streaming.stream(PROMPT)) == story
    assert streaming.invoke(PROMPT) == story
