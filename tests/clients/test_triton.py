"""tritonclient over HTTP: infer, and the pages it reads. It has no streaming over HTTP: httpx reads generate_stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.http as triton

from tests.clients.conftest import MODEL, PROMPT, TOKENS
from tests.support.dialects import prompt_tensors
from tests.support.server import Server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton.InferenceServerClient(server.url.removeprefix("http://"), concurrency=8) as client:
        yield client


def inputs(*, binary: bool) -> list[Any]:
    return prompt_tensors(triton, PROMPT, TOKENS, binary_data=binary)


@pytest.mark.parametrize("model", ["ensemble", "tensorrt_llm_bls", MODEL])
@pytest.mark.parametrize("binary", [True, False])
def test_infer(client: Any, story: str, model: str, binary: bool) -> None:
    result = client.infer(model, inputs(binary=binary))
    assert result.as_numpy("text_output").reshape(-1)[0].decode() == story
    waiting = [client.async_infer(model, inputs(binary=binary)) for _ in range(8)]
    assert {one.get_result().as_numpy("text_output").reshape(-1)[0].decode() for one in waiting} == {story}


def test_the_pages(client: Any) -> None:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("ensemble")
    assert client.get_model_metadata("ensemble")["name"] == "ensemble"
    assert {model["state"] for model in client.get_model_repository_index()} == {"READY"}


def test_generate_stream(server: Server, story: str) -> None:
    body = {"text_input": PROMPT, "max_tokens": TOKENS, "bad_words": "", "stop_words": "", "stream": True}
    with server.http.stream("POST", "/v2/models/ensemble/generate_stream", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert len(events) > 1
    assert "".join(event["text_output"] for event in events) == story
