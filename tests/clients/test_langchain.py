"""LangChain's chat and text models, SagemakerEndpoint over boto3, and published clients of embeddings and reranking."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import boto3
import httpx
import numpy as np
import pytest
from langchain_aws.llms import SagemakerEndpoint
from langchain_aws.llms.sagemaker_endpoint import LLMContentHandler
from langchain_openai import ChatOpenAI, OpenAI

from tests.clients.conftest import MODEL, PROMPT, TOKENS
from tests.clients.test_agents import HARNESSES, ROOT, loops
from tests.support.encoders import scripted_encoder
from tests.support.server import Server, serving


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


TEXTS = ["The wolf", "A little girl", "The grandmother was ill in bed"]
"""The texts of `embedding_clients.py`."""


@pytest.mark.slow
def test_each_client_gets_the_same_vectors_and_ranks(tmp_path: Path) -> None:
    python = ROOT / ".venv-embeddings" / "bin" / "python"
    with (
        serving(scripted_encoder(tmp_path / "encoder")) as embedding,
        serving(scripted_encoder(tmp_path / "reranker", labels=1)) as reranking,
    ):
        found = loops(python, HARNESSES / "embedding_clients.py", embedding.url, reranking.url, folder=tmp_path)
        vectors = httpx.post(embedding.url + "/embed", json={"inputs": TEXTS}, trust_env=False).json()
        body = {"query": "Who?", "texts": TEXTS}
        ranks = httpx.post(reranking.url + "/rerank", json=body, trust_env=False).json()
    cohere = found.pop()
    assert cohere["found"] == [each["index"] for each in ranks]
    assert len(found) == 5
    for client in found:
        assert np.allclose(client["found"], vectors, atol=1e-6), client["client"]
