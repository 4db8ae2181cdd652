"""SageMaker's runtime: boto3 and OpenAI's client, unmodified, with this server in the place of an endpoint."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from botocore.exceptions import EventStreamError

from djl_trtllm.model import Tokenizer
from tests.integration.server.conftest import Start
from tests.support.client import body
from tests.support.models import PROMPT
from tests.support.sagemaker_runtime import runtime_of
from tests.support.server import Server


def parts(answer: Any) -> bytes:
    return b"".join(event["PayloadPart"]["Bytes"] for event in answer["Body"])


def stream(runtime: Any, content: bytes, **arguments: Any) -> Any:
    return runtime.invoke_endpoint_with_response_stream(
        EndpointName="story", Body=content, ContentType="application/json", **arguments
    )


def test_boto3_reads_a_stream(runtime: Any, tokenizer: Tokenizer) -> None:
    answer = stream(runtime, body(7, stream=True))
    assert (answer["ContentType"], answer["InvokedProductionVariant"]) == ("application/jsonlines", "AllTraffic")
    lines = parts(answer).splitlines()
    text = tokenizer.decode(tokenizer.encode(PROMPT)[:7])
    assert len(lines) == 7 and json.loads(lines[-1])["generated_text"] == text
    answer = stream(runtime, body(7, stream=True), Accept="text/event-stream")
    assert answer["ContentType"] == "text/event-stream"
    assert parts(answer).startswith(b"data: ")
    assert json.loads(parts(stream(runtime, body(7))))["generated_text"] == text


def test_boto3_raises_the_error_of_a_stream(runtime: Any) -> None:
    answer = stream(runtime, body(77, stream=True))
    read = []
    with pytest.raises(EventStreamError, match="scripted error") as raised:
        for event in answer["Body"]:
            read.append(event["PayloadPart"]["Bytes"])
    assert raised.value.response["Error"]["Code"] == "ModelStreamError"
    last = json.loads(b"".join(read).splitlines()[-1])
    assert last["details"]["finish_reason"] == "error"


def test_boto3_raises_model_error_before_a_stream(runtime: Any) -> None:
    with pytest.raises(runtime.exceptions.ModelError, match="max_new_tokens") as raised:
        stream(runtime, body(0, stream=True))
    assert raised.value.response["OriginalStatusCode"] == 424


def test_boto3_has_a_session(start: Start, tmp_path: Path) -> None:
    environ = {"SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true", "SAGEMAKER_SESSIONS_PATH": str(tmp_path / "sessions")}
    with runtime_of(start({}, environ).url) as runtime:
        call = partial(runtime.invoke_endpoint, EndpointName="story", ContentType="application/json")
        opened = call(Body=b'{"requestType": "NEW_SESSION"}', SessionId="NEW_SESSION")["NewSessionId"]
        identifier = opened.partition(";")[0]
        assert [folder.name for folder in (tmp_path / "sessions").iterdir()] == [identifier]
        assert "generated_text" in json.loads(call(Body=body(3), SessionId=identifier)["Body"].read())
        assert parts(stream(runtime, body(3, stream=True), SessionId=identifier))
        assert call(Body=b'{"requestType": "CLOSE"}', SessionId=identifier)["ClosedSessionId"] == identifier
        with pytest.raises(runtime.exceptions.ModelError, match="session not found") as raised:
            call(Body=body(3), SessionId=identifier)
        assert raised.value.response["OriginalStatusCode"] == 400


@pytest.mark.parametrize("component", ["", "/inference-components/adapter-1"])
def test_openais_client_on_an_endpoint(server: Server, component: str) -> None:
    url = f"{server.url}/endpoints/story{component}/openai/v1"
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": PROMPT}]
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="", messages=messages, max_tokens=7, temperature=0)
        chunks = client.chat.completions.create(model="", messages=messages, max_tokens=7, temperature=0, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content != ""
        assert [model.id for model in client.models.list()] == ["scripted"]
        with pytest.raises(openai.NotFoundError, match="no model named 'gpt-5'"):
            client.chat.completions.create(model="gpt-5", messages=messages)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="", messages=messages, max_tokens=0)
