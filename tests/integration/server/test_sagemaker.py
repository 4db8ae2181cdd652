"""SageMaker's contract: its routes, its container standards, and clients on the address of /invocations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from botocore.exceptions import EventStreamError

from djl_trtllm.model import Tokenizer
from tests.support.client import body
from tests.support.models import PROMPT, lora_tensors, scripted_model, tensorrt_llm_model, write_adapter
from tests.support.sagemaker_front import runtime_of
from tests.support.server import Server, serving

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(
    ("content", "status", "expected"),
    [
        (body(0), 424, "max_new_tokens"),
        (b"{", 424, "Invalid"),
        (b" " * 300_000, 413, "max_request_size=200000"),
    ],
)
def test_boto3_raises_model_error_with_the_message(runtime: Any, content: bytes, status: int, expected: str) -> None:
    with pytest.raises(runtime.exceptions.ModelError, match=expected) as raised:
        runtime.invoke_endpoint(EndpointName="story", Body=content, ContentType="application/json")
    response = raised.value.response
    assert response["OriginalStatusCode"] == status
    assert expected in response["OriginalMessage"]
    assert f"Received client error ({status}) from primary" in response["Error"]["Message"]
    assert response["ResponseMetadata"]["HTTPStatusCode"] == 424


def test_boto3_has_a_session(stateful: Server, sessions: Path) -> None:
    with runtime_of(stateful.url) as runtime:
        call = partial(runtime.invoke_endpoint, EndpointName="story", ContentType="application/json")
        opened = call(Body=b'{"requestType": "NEW_SESSION"}', SessionId="NEW_SESSION")["NewSessionId"]
        identifier = opened.partition(";")[0]
        assert (sessions / identifier).is_dir()
        assert "generated_text" in json.loads(call(Body=body(3), SessionId=identifier)["Body"].read())
        assert parts(stream(runtime, body(3, stream=True), SessionId=identifier))
        assert call(Body=b'{"requestType": "CLOSE"}', SessionId=identifier)["ClosedSessionId"] == identifier
        with pytest.raises(runtime.exceptions.ModelError, match="session not found") as raised:
            call(Body=body(3), SessionId=identifier)
        assert raised.value.response["OriginalStatusCode"] == 400


# -- what the integration tests of model-hosting-container-standards send, sent to this server -------------------------
#
# Source: aws/model-hosting-container-standards (0.1.17, @d77870c), python/tests/integration. Each of its tests makes a
# FastAPI application in its own process, so they cannot be pointed at a port: here are their requests and what they
# expect of the responses, class by class. docs/verification.md lists what is left out, and why.

SESSION = "X-Amzn-SageMaker-Session-Id"
NEW = "X-Amzn-SageMaker-New-Session-Id"
CLOSED = "X-Amzn-SageMaker-Closed-Session-Id"
ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"
REQUEST = {"inputs": "the wolf", "parameters": {"max_new_tokens": 2}}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the server's sessions."""
    return tmp_path_factory.mktemp("stateful") / "sessions"


@pytest.fixture(scope="module")
def stateful(sessions: Path) -> Iterator[Server]:
    given = {
        "SAGEMAKER_ENABLE_STATEFUL_SESSIONS": "true",
        "SAGEMAKER_SESSIONS_PATH": str(sessions),
        "SAGEMAKER_SESSIONS_EXPIRATION": "600",
    }
    with serving(scripted_model(sessions.parent / "model"), sessions.parent, **given) as server:
        yield server


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapting")
    model, fake = tensorrt_llm_model(folder / "model", {}, **{"option.enable_lora": "true"})
    for name in ("a", "b", "c"):
        write_adapter(model / "adapters" / "more" / name)
    (write_adapter(model / "adapters" / "more" / "bare") / "adapter_model.safetensors").unlink()
    write_adapter(model / "adapters" / "wide", lora_tensors(rank=128))
    with serving(model, folder, **fake) as server:
        yield server


def post(server: Server, content: Any, session: str | None = None) -> httpx.Response:
    return server.http.post("/invocations", json=content, headers={} if session is None else {SESSION: session})


def opened(server: Server) -> str:
    """The identifier of a new session: TestSessionCreation."""
    answer = post(server, {"requestType": "NEW_SESSION"})
    assert answer.status_code == 200
    assert "session" in answer.text.lower()
    identifier, _, expires = answer.headers[NEW].partition("; ")
    assert len(identifier) == 36
    assert expires.startswith("Expires=")
    return identifier


def closed(server: Server, session: str) -> None:
    """Close it: TestSessionClosure."""
    answer = post(server, {"requestType": "CLOSE"}, session)
    assert (answer.status_code, answer.headers[CLOSED]) == (200, session)


def test_sessions_live_beside_each_other_until_they_are_closed(stateful: Server) -> None:
    """TestSessionUsage, TestSessionEndToEndFlow."""
    sessions = [opened(stateful) for _ in range(3)]
    assert len(set(sessions)) == 3
    assert post(stateful, REQUEST).status_code == 200
    for session in (*sessions, *sessions):
        assert post(stateful, REQUEST, session).status_code == 200
    closed(stateful, sessions[0])
    assert post(stateful, REQUEST, sessions[0]).status_code == 400
    assert post(stateful, REQUEST, sessions[1]).status_code == 200
    for session in sessions[1:]:
        closed(stateful, session)


@pytest.mark.parametrize("by", ["json", "params"])
def test_an_adapter_is_registered_used_and_unregistered(adapting: Server, by: str) -> None:
    """TestLoRARouterRedirection, TestLoRARequestResponseTransformation, TestLoRAEndToEndFlow."""
    for name in ("a", "b", "c"):
        given: dict[str, Any] = {by: {"name": name, "src": f"more/{name}"}}
        answer = adapting.http.post("/adapters", **given)
        assert answer.status_code == 200, answer.text
    for name in ("a", "b"):
        assert adapting.http.post("/invocations", json=REQUEST, headers={ADAPTER: name}).status_code == 200
    assert adapting.http.delete("/adapters/a").status_code == 200
    assert adapting.http.post("/invocations", json=REQUEST, headers={ADAPTER: "c"}).status_code == 200
    assert adapting.http.post("/invocations", json=REQUEST).status_code == 200
    for name in ("b", "c"):
        answer = adapting.http.delete(f"/adapters/{name}")
        assert answer.status_code == 200
        assert name in answer.text
