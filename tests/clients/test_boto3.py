"""boto3's sagemaker-runtime, with this server as its endpoint: plain and as a response stream."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest

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
